"""Everything that a rank trains: its part of the model, what `auto` stands for, the optimizer and CUDA graphs, from the config."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llmtrain.adapt.base import adapted
from llmtrain.adapt.float8 import compute_scales, compute_scales_after_steps
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.kernels.platform import detect
from llmtrain.logs import run_log
from llmtrain.models.backends import Chosen
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.parameters import parameter_info
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.objectives.base import Objective, build_objective
from llmtrain.plan.automatic import resolve_auto
from llmtrain.plan.memory import ParameterSizes
from llmtrain.plan.parameters import parameter_sizes
from llmtrain.schema.config import Config
from llmtrain.train.callbacks.throughput import TokenCost, token_cost
from llmtrain.train.callbacks.weight_average import WeightAverage
from llmtrain.train.faults.spike_window import SpikeWindow
from llmtrain.train.graphs.cuda_graphs import GraphedLoss, graphed_loss
from llmtrain.train.microbatch import choose_microbatch, of_size
from llmtrain.train.optim import build_optimizer, learning_rates
from llmtrain.train.parallel import parallelize
from llmtrain.train.pipeline.schedule import PipelineStep
from llmtrain.train.pipeline.stages import StagedLM
from llmtrain.train.step import GradientSync, Step


@dataclass(frozen=True)
class Training:
    """config: without `auto`. segments: this rank's, where ranks share sequences. peaks: learning rates of the optimizer's groups.
    graphs, spikes, average: None without them."""

    config: Config
    model: CausalLM
    objective: Objective
    segments: ContextParallelRanks | None
    optimizer: torch.optim.Optimizer
    peaks: list[float]
    cost: TokenCost
    graphs: GraphedLoss | None
    spikes: SpikeWindow | None
    average: WeightAverage | None
    added: frozenset[str]
    """Names of the parameters that the model has by `adapt`."""

    @property
    def parts(self) -> list[save_load.Part]:
        """Parts that checkpoints hold beside weights and optimizer."""
        return [part for part in (self.spikes, self.average) if part is not None]

    def step(self, group: dist.ProcessGroup) -> Step:
        """group: of all ranks, for messages in host memory."""
        sync, size = GradientSync(self.model, self.config.train.sharding), self.config.train.least_microbatch
        kind = PipelineStep if isinstance(self.model, StagedLM) else Step
        parallel = self.config.train.parallel
        copies = parallel.pipeline * parallel.tensor
        return kind(self.model, self.objective, size, sync, group, self.segments, self.graphs, copies)

    def load(self, found: LocalCheckpoint, verify_base: bool = False) -> None:
        """Weights, optimizer and parts of a checkpoint whose hashes were verified; verify_base: verify those of one beneath it."""
        save_load.load(
            found.folder,
            self.model.hybrid,
            self.optimizer,
            manifest=found.require(),
            verify=False,
            verify_base=verify_base,
            parts=self.parts,
        )

    def go_back(self, found: LocalCheckpoint) -> None:
        """The same between two steps."""
        self.load(found)
        if self.config.train.float8 is not None and self.config.train.float8.gathers:
            compute_scales(self.model.hybrid)


def build(config: Config, world: World, device: torch.device) -> Training:
    """The model without weights yet, and what trains it. Every rank calls this."""
    train = config.train
    with torch.device("meta"):
        model = HybridLM(config.model, dtype=getattr(torch, train.dtype), documents=config.data.mask_documents)
    require_same_kernels(model.chosen_kernels(), world)
    causal_lm = (StagedLM if train.parallel.pipeline > 1 else CausalLM)(model, train.loss)
    objective = build_objective(config.objective)
    plain, sizes = dict(model.named_parameters()), parameter_sizes(config)
    resolved = resolved_config(config, sizes, world, device)
    # Before checkpointing wraps the layers.
    cost = token_cost(adapted(model, config.adapt), resolved.train, config.data.seq_len, device)
    segments = parallelize(causal_lm, resolved.train, world, device, config.adapt, config.data.seq_len)
    model = causal_lm.hybrid  # this rank's stage, perhaps
    added = frozenset(info.name for info in parameter_info(model).values()) - plain.keys()
    optimizer = build_optimizer(model, config.optimizer)
    if train.float8 is not None and train.float8.gathers:
        compute_scales_after_steps(model, optimizer)
    spikes = SpikeWindow(train.spike) if train.spike else None
    average = WeightAverage(model, train.ema) if train.ema else None
    if train.microbatch_size == "auto":
        size, reason = choose_microbatch(config, resolved, sizes, causal_lm, objective, segments, world, device)
        run_log.info(reason)
        resolved = of_size(resolved, size)
    graphs = graphed_loss(resolved, causal_lm, objective, world)
    # The rates now: a checkpoint brings those of its step.
    peaks = learning_rates(optimizer)
    return Training(resolved, causal_lm, objective, segments, optimizer, peaks, cost, graphs, spikes, average, added)


def resolved_config(config: Config, sizes: ParameterSizes, world: World, device: torch.device) -> Config:
    """The config without `auto`, the same on all ranks."""
    available = None
    if device.type == "cuda":
        smallest = torch.tensor(detect(device).memory_bytes, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        available = smallest.item()
    resolved = resolve_auto(config, sizes, world.size, world.local_size, available)
    for line in resolved.reasons:
        if "microbatch_size" not in line:  # which is searched for
            run_log.info(line)
    return resolved.config


def require_same_kernels(kernels: Iterable[Chosen], world: World) -> None:
    """Raise UserError, on all ranks, if a block's backend is another on some node: which is the fastest depends on tables that each
    machine may have of its own. Every rank calls this."""
    if world.size == world.local_size:
        return
    own = [(one.block, one.kernel.operation, one.backend) for one in kernels]
    ranks: list[list[tuple[str, str, str | None]]] = [[] for _ in range(world.size)]
    dist.all_gather_object(ranks, own)
    for rank, theirs in enumerate(ranks):
        for (block, operation, expected), (_, _, found) in zip(ranks[0], theirs, strict=True):
            if found != expected:
                raise UserError(
                    f"block {block}: {operation} would run by {expected} on rank 0 and by {found} on rank {rank}, for `auto` "
                    "goes by measurements, which differ between these machines: copy ~/.config/llmtrain/tuning to all of "
                    "them, name one file by LLMTRAIN_TUNING, or name the backend in the YAML"
                )
