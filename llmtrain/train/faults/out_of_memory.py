"""The message for a user whose GPU ran out of memory."""

import torch

from llmtrain.errors import UserError, first_line
from llmtrain.flops.units import binary
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.candidates import ADVISED
from llmtrain.plan.fitting import plans_that_fit, ranks_that_fit
from llmtrain.plan.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.schema.config import Config


def explain(
    error: torch.OutOfMemoryError,
    config: Config,
    world_size: int,
    available: int,
    local_size: int | None = None,
    graphs: int = 0,
) -> str:
    """available, graphs: bytes of memory of this rank's GPU, and of its CUDA graphs. local_size: ranks of a node; default: all."""
    local_size = local_size or world_size
    sizes = parameter_sizes(config)
    config = resolve_auto(config, sizes, world_size, local_size, available).config
    # torch's message goes on with how much is in use, and with advice about its allocator.
    first = first_line(error).split(". GPU ")[0].rstrip(".")
    estimate = estimate_memory(config, sizes, world_size)
    lines = [f"{first}: the GPU has {binary(available)}. By the estimate of `llmtrain describe` the run takes"]
    lines += [f"  {binary(size):>10}  {name}" for name, size in _parts(estimate)]
    lines += [f"  {binary(estimate.total):>10}  together"]
    if graphs:
        lines.append(
            f"CUDA graphs hold {binary(graphs)}, which serve nothing but the passes of a microbatch. Without them validation "
            "and the optimizer may use the same memory: train.cuda_graphs=off"
        )
    return "\n".join(lines + _advice(config, sizes, world_size, estimate, available))


def _parts(memory: Memory) -> list[tuple[str, int]]:
    return sorted(((name, size) for name, size in vars(memory).items() if size), key=lambda part: -part[1])


def _advice(config: Config, sizes: ParameterSizes, world_size: int, estimate: Memory, available: int) -> list[str]:
    limit = ADVISED * available
    if estimate.total <= limit:
        # It ran out all the same: ask for clearly less than what did not fit.
        limit = 0.8 * estimate.total
        lines = ["That would fit: the estimate is too low here, or other programs use the GPU (nvidia-smi, rocm-smi)."]
    else:
        lines = []
    try:
        found = plans_that_fit(config, sizes, world_size, limit)
    except UserError:  # a batch that cannot be split as it is
        found = []
    if found:
        lines.append("Settings that would fit, by the estimate:")
        lines += [f"  {' '.join(fit.settings)}   ({binary(fit.memory.total)}; {fit.price})" for fit in found]
        return lines
    lines.append(f"No microbatch, sharding, recomputation or optimizer.offload makes it fit on {world_size} GPU(s).")
    if enough := ranks_that_fit(config, sizes, world_size, limit):
        ranks, settings = enough
        lines.append(f"{ranks} GPUs would be enough" + (f", with {' '.join(settings)}." if settings else "."))
    return lines
