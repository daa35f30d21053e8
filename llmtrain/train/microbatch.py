"""The size of a microbatch where train.microbatch_size is auto: a few are tried when a run starts, the fastest is remembered.

The first is the largest that fits by the estimate. As long as a larger one would fit, judged by the memory that the last one took
beside weights, gradients and optimizer state, it is tried too. A size fails only where the estimate is wrong; then smaller ones are
tried. All ranks take the same decisions, also where only some of them run out of memory. Where a run will launch CUDA graphs, a
trial is timed by them.
"""

import gc
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import read_json
from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.logs import log
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.layer_part import step_sums
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.objectives.base import Objective, compute_loss
from llmtrain.plan.candidates import MEASURED, microbatches
from llmtrain.plan.graph_gain import reason_against
from llmtrain.plan.memory import ParameterSizes, estimate_memory
from llmtrain.schema.config import Config
from llmtrain.train.graphs.cuda_graphs import replay_seconds
from llmtrain.train.ranks.fsdp_reset import reset_fsdp
from llmtrain.train.ranks.memory_agreement import MemoryAgreement, OutOfMemoryElsewhere

FILE = "microbatch.json"
_REPEATS = 3  # the first compiles, the last is timed
_MOST_TRIALS = 4


@dataclass(frozen=True)
class Trial:
    """One size: seconds per sequence of forward and backward passes on the slowest rank, and the peak of memory on the fullest."""

    size: int
    seconds: float
    peak: float


class Gauge:
    """Memory and clock of this rank's GPU. Sizes are in bytes."""

    def __init__(self, device: torch.device):
        self.name = torch.cuda.get_device_name(device)
        self.total = torch.cuda.mem_get_info()[1]

    def available(self) -> float:
        """Memory that this process has and may still get."""
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()

    def allocated(self) -> float:
        return torch.cuda.memory_allocated()

    def begin(self) -> None:
        """Give back what is not in use, and measure the peak from here on."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        return torch.cuda.max_memory_allocated()

    def seconds(self) -> float:
        """The time once everything so far is done."""
        torch.cuda.synchronize()
        return time.perf_counter()


def search(
    sizes: Sequence[int], start: int, attempt: Callable[[int], Trial | None], fixed: float, limit: float
) -> list[Trial]:
    """Trials of sizes that fit, in the order in which they were made; empty where none does.

    sizes: those that are allowed, rising. attempt: None where memory was not enough. fixed, limit: bytes that every size takes,
    and bytes that may be in use. What a trial takes more than `fixed` grows at most in proportion to the size.
    """
    found: list[Trial] = []
    at = sizes.index(start)
    while at >= 0 and (trial := attempt(sizes[at])) is None:
        at -= 1
    if at < 0:
        return found
    found.append(trial)
    if sizes[at] != start:
        return found  # the next larger one has failed
    for size in sizes[at + 1 :]:
        last = found[-1]
        if len(found) == _MOST_TRIALS or fixed + (last.peak - fixed) * size / last.size > limit:
            break
        if (trial := attempt(size)) is None or trial.peak > limit:
            break
        found.append(trial)
        if trial.seconds > last.seconds:
            break
    return found


def fastest(trials: Sequence[Trial]) -> Trial:
    return min(trials, key=lambda trial: trial.seconds)


def choose_microbatch(
    config: Config,
    resolved: Config,
    sizes: ParameterSizes,
    model: CausalLM,
    objective: Objective,
    segments: ContextParallelRanks | None,
    world: World,
    device: torch.device,
    gauge: Gauge | None = None,
) -> tuple[int, str]:
    """The size, and a line that says why. Called by every rank, before weights are set: they are 0 after it, without gradients.

    config, resolved: with and without `auto`; the size in `resolved` is the estimate's. sizes: of parameter_sizes. gauge: default:
    of a GPU, if device is one.
    Raises UserError where nothing fits.
    """
    start = resolved.train.least_microbatch
    if gauge is None and device.type != "cuda":
        return start, f"train.microbatch_size auto: {start} (no GPU whose memory would limit it)"
    gauge = gauge or Gauge(device)
    path = Path(config.run_dir) / FILE
    key = search_key(config, resolved, world, gauge)
    allowed = microbatches(config, world.size)
    known = [remembered(path, key, allowed) if world.is_main else None]
    dist.broadcast_object_list(known, src=0)
    if known[0] is not None:
        return known[0], f"train.microbatch_size auto: {known[0]}, as found before ({path})"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    estimate = estimate_memory(resolved, sizes, world.size)
    # In place of the optimizer's state, which comes with its first step, and of what rollouts hold.
    reserve = torch.empty(estimate.optimizer + estimate.rollouts, dtype=torch.uint8, device=device)
    gauge.begin()
    fixed = estimate.weights + estimate.gradients + estimate.optimizer + estimate.rollouts
    fixed = _most(max(gauge.allocated(), fixed), device)
    limit = MEASURED * -_most(-gauge.available(), device)
    # Each size compiles every kind of layer anew.
    torch._dynamo.config.recompile_limit += 4 * len(config.model.blocks) * (_MOST_TRIALS + len(allowed))
    agreement = MemoryAgreement()

    def attempt(size: int) -> Trial | None:
        return _attempt(of_size(resolved, size), model, objective, segments, world, device, gauge, agreement)

    trials = search(allowed, start, attempt, fixed, limit)
    agreement.close()
    for total in step_sums(model):
        total.zero_()
    del reserve
    gauge.begin()
    if not trials:
        raise UserError(
            "train.microbatch_size auto: not even one sequence fits; recompute activations "
            "(train.activation_checkpointing: {type: auto}), or use more GPUs"
        )
    best = fastest(trials)
    if world.is_main:
        remember(path, key, best, trials)
    tried = ", ".join(f"{trial.size}: {1000 * trial.seconds:.0f} ms a sequence" for trial in trials)
    return best.size, f"train.microbatch_size auto: {best.size} ({tried})"


def search_key(config: Config, resolved: Config, world: World, gauge: Gauge) -> str:
    """A name for all that memory and speed depend on."""
    train = resolved.train.model_dump(mode="json")
    for name in ("microbatch_size", "duration", "profile", "peak_tflops", "nonfinite", "spike", "max_skipped_steps"):
        del train[name]
    what: dict[str, Any] = {
        "model": config.model.model_dump(mode="json"),
        "train": train,
        "optimizer": [config.optimizer.type, config.optimizer.offload],
        "seq_len": config.data.seq_len,
        "documents": config.data.mask_documents,
        "ranks": [world.size, world.local_size],
        "device": [gauge.name, gauge.total],
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def remembered(path: Path, key: str, allowed: Sequence[int]) -> int | None:
    """The size that an earlier start found, if it is one that this run may have."""
    try:
        size = read_json(path)[key]["microbatch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return size if type(size) is int and size in allowed else None


def remember(path: Path, key: str, best: Trial, trials: Sequence[Trial]) -> None:
    try:
        known = read_json(path)
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    known[key] = {"microbatch_size": best.size, "trials": [asdict(trial) for trial in trials]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(known, indent=1).encode())
    except OSError as error:
        log.warning(f"train.microbatch_size auto: not remembered, so the next start searches again: {error}")


def is_out_of_memory(error: BaseException) -> bool:
    """True for CUDA's and HIP's allocator, and for libraries that ask the driver themselves."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)


def of_size(config: Config, microbatch_size: int) -> Config:
    """The config with microbatches of this size."""
    return config.model_copy(update={"train": config.train.model_copy(update={"microbatch_size": microbatch_size})})


def _attempt(
    config: Config,
    model: CausalLM,
    objective: Objective,
    segments: ContextParallelRanks | None,
    world: World,
    device: torch.device,
    gauge: Gauge,
    agreement: MemoryAgreement,
) -> Trial | None:
    """Forward and backward passes, of which the last is timed. Those before take as much memory, so that it is they that fail,
    on some of the ranks; where the last fails, the run ends. The first does not reduce gradients where a step does so once. Where
    the run would launch CUDA graphs and they can be made, the time is theirs.
    """
    gauge.begin()
    size, once = config.train.least_microbatch, config.train.sharding.sync_every_microbatch is False
    local = config.microbatch_tokens(1)
    tokens = (torch.arange(size * local, device=device) % config.model.vocab_size).view(size, local)
    batch = {"input_ids": tokens}
    if config.data.mask_documents:
        whole = local * (segments.size if segments else 1)
        batch["document_ids"] = torch.zeros(size, whole, dtype=torch.int64, device=device)
    batch |= objective.example(tokens)
    seconds, fits, agreeing = 0.0, True, True

    def backward_pass(repeat: int) -> None:
        synced = not once or repeat > 0
        model.set_requires_gradient_sync(synced)  # type: ignore[operator]
        model.set_reshard_after_backward(synced)  # type: ignore[operator]
        compute_loss(model, objective, batch, segments).loss.backward()

    try:
        for repeat in range(_REPEATS - 1):
            with agreement.before_collectives(model):
                backward_pass(repeat)
            agreement.agree()
        agreeing = agreement.group is None
        began = gauge.seconds()
        backward_pass(_REPEATS - 1)
        seconds = gauge.seconds() - began
    except RuntimeError as error:
        if not (agreeing and is_out_of_memory(error)):
            raise
        fits = False
        error.__traceback__ = None  # whose frames hold activations
        if not isinstance(error, OutOfMemoryElsewhere):
            agreement.failed()
        reset_fsdp(model)
    peak = gauge.peak()
    model.zero_grad(set_to_none=True)
    parameters, one_node = sum(p.numel() for p in model.parameters()), world.size == world.local_size
    if fits and reason_against(config, model.hybrid.platform, parameters, world.size, one_node) is None:
        replayed = replay_seconds(model, objective, batch, gauge.seconds, world.size)
        fits = replayed is not None or config.train.cuda_graphs != "on"
        seconds, peak = replayed or seconds, gauge.peak()
    if _most(0.0 if fits else 1.0, device):
        return None
    return Trial(size, _most(seconds, device) / size, _most(peak, device))


def _most(value: float, device: torch.device) -> float:
    """The largest of all ranks' values."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()
