"""Collectives of tensor-parallel ranks, computed piecewise beside the matrix products that they feed or follow ("async TP").

The compiler puts each gathering of tokens and the product behind it, and each product and the scattering behind it, into one
operator of PyTorch's symmetric memory: a rank multiplies the tokens that have come while the others' travel. So it is done in
compiled layers alone, and the embedding, the head and the loss exchange as before.
"""

import logging
import warnings

import torch
import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.errors import UserError, first_line
from llmtrain.kernels.platform import Platform
from llmtrain.logs import run_log
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.schema.training import TrainConfig

_COMPILER = "torch._inductor.fx_passes.micro_pipeline_tp"


def refusal(config: TrainConfig, world: World, platform: Platform) -> str | None:
    """Reason why this rank's collectives cannot run beside products, or with `auto` shall not; None: they can."""
    if platform.vendor == "cpu":
        return "there are no GPUs that read each other's memory"
    if config.compile == "off":
        return "layers are not compiled"
    if platform.vendor == "amd" and config.parallel.async_tensor == "auto":
        return "it was not tried on AMD (train.parallel.async_tensor: on takes it)"
    if world.local_size % world.tensor:
        return f"a group of {world.tensor} ranks lies on several nodes"
    first = world.local_rank // world.tensor * world.tensor
    for other in range(first, first + world.tensor):
        if other != world.local_rank and not torch.cuda.can_device_access_peer(world.local_rank, other):
            return f"GPU {world.local_rank} cannot read the memory of GPU {other}"
    return None


def overlap_products(ranks: TensorRanks, config: TrainConfig, world: World, platform: Platform) -> bool:
    """Have the compiler overlap collectives with products, by train.parallel.async_tensor; return whether it will.

    Every rank calls this, before it compiles. Raises UserError where it is asked for and cannot be.
    """
    setting = config.parallel.async_tensor
    if setting == "off":
        return False
    reason = refusal(config, world, platform) or _reason_of_group(ranks)
    if reason is None:
        from torch._inductor import config as inductor

        inductor._micro_pipeline_tp = True  # of groups with symmetric memory: a later run without is not concerned
        # Of collectives without a product beside them, as the sums of a norm that several ranks share.
        logging.getLogger(_COMPILER).setLevel(logging.ERROR)
        run_log.info("tensor parallelism: collectives of compiled layers run beside their products (async_tensor)")
        return True
    if setting == "on":
        raise UserError(f"train.parallel.async_tensor = on: it cannot be here, as {reason}; use auto or off")
    if platform.vendor != "cpu":
        run_log.info(f"tensor parallelism: collectives wait for their products (async_tensor: off), as {reason}")
    return False


def _reason_of_group(ranks: TensorRanks) -> str | None:
    """Reason why the ranks of the group cannot share memory, or None; the same on each."""
    from torch.distributed import _symmetric_memory

    reason = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "no need to call": the compiler's pass asks for it
            _symmetric_memory.enable_symm_mem_for_group(ranks.group)
        _symmetric_memory.get_symm_mem_workspace(ranks.group, min_size=2**20)
    except RuntimeError as error:
        reason = first_line(error)
    failed = torch.tensor(int(reason is not None), device="cuda")
    dist.all_reduce(failed, group=dist.distributed_c10d._resolve_process_group(ranks.group))
    return reason or ("another rank of the group has no symmetric memory" if failed else None)
