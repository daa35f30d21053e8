"""Choices for `auto` in train.sharding, train.activation_checkpointing, train.microbatch_size and objective.rollout.weights: the
fastest that fits, by the estimate of memory.py.

Shardings from fast to slow, as measured on two H200s over NVLink (MPT-1B; tokens/s kept of one GPU's): grad_op with one gradient
sync a step 98 %, grad_op 94 %, full 92 %. Over several nodes hybrid comes first, where only gradients cross the network, once a
step where that fits (not measured). Recomputation costs more than any of them, and a small microbatch as much as either: see
`Candidate.time`. No torch here.
"""

from dataclasses import dataclass, replace

from llmtrain.flops.units import binary
from llmtrain.plan.candidates import CHOSEN, candidates_of_auto
from llmtrain.plan.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.schema.config import Config

_TOKENS_ON_CPU = 4096


@dataclass(frozen=True)
class ResolvedConfig:
    """config: free of `auto`. reasons: a line for each choice, for the user; empty where there was none."""

    config: Config
    reasons: tuple[str, ...]


def resolve_auto(
    config: Config, sizes: ParameterSizes, world_size: int, local_size: int, available: float | None
) -> ResolvedConfig:
    """A config with every `auto` of sharding, recomputation, microbatch and rollouts replaced.

    local_size: ranks of one node. available: bytes of a GPU; None: without GPUs, where nothing is gained by more memory.
    Raises UserError where the batch cannot be split over the ranks.
    """
    rollout = config.objective.own_rollout
    if rollout is None or rollout.weights != "auto":
        return _resolved(config, sizes, world_size, local_size, available)
    why = "train.float8 has none"
    if config.train.float8 is None:
        copied = _resolved(_drawing(config, "copied"), sizes, world_size, local_size, available)
        needed = estimate_memory(copied.config, sizes, world_size).total
        if available is None or needed <= CHOSEN * available:
            return replace(copied, reasons=(*copied.reasons, "objective.rollout.weights auto: copied"))
        why = f"with a copy the estimate is {binary(needed)} of {binary(available)}"
    found = _resolved(_drawing(config, "gathered"), sizes, world_size, local_size, available)
    return replace(found, reasons=(*found.reasons, f"objective.rollout.weights auto: gathered ({why})"))


def _drawing(config: Config, weights: str) -> Config:
    """The config with objective.rollout.weights."""
    assert config.objective.own_rollout is not None
    rollout = config.objective.own_rollout.model_copy(update={"weights": weights})
    return config.model_copy(update={"objective": config.objective.model_copy(update={"rollout": rollout})})


def _resolved(
    config: Config, sizes: ParameterSizes, world_size: int, local_size: int, available: float | None
) -> ResolvedConfig:
    train = config.train
    if "auto" not in (train.sharding.strategy, train.activation_checkpointing.type, train.microbatch_size):
        return ResolvedConfig(config, ())
    found = candidates_of_auto(config, world_size, local_size, gpus=available is not None)
    candidates = [candidate.config for candidate in sorted(found, key=lambda candidate: candidate.time)]
    if available is None:
        chosen = min(candidates, key=_on_cpu)
        return ResolvedConfig(chosen, _reasons(config, chosen, "no GPU", shards=world_size > 1))
    estimates = [(candidate, estimate_memory(candidate, sizes, world_size)) for candidate in candidates]
    limit = CHOSEN * available
    fitting = next(((candidate, memory) for candidate, memory in estimates if memory.total <= limit), None)
    if fitting is None:
        chosen, memory = min(estimates, key=lambda estimate: estimate[1].total)
        why = f"takes the least, {_share(memory, available)}, and may be too much"
    else:
        chosen, memory = fitting
        why = f"the fastest that fits: {_share(memory, available)} by the estimate"
    return ResolvedConfig(chosen, _reasons(config, chosen, why, shards=world_size > 1))


def _on_cpu(config: Config) -> tuple[bool, int]:
    """Order of candidates without GPUs: the largest microbatch of up to _TOKENS_ON_CPU tokens, or else the smallest."""
    tokens = config.microbatch_tokens(config.train.least_microbatch)
    small = tokens <= _TOKENS_ON_CPU
    return not small, -tokens if small else tokens


def _share(memory: Memory, available: float) -> str:
    return f"{binary(memory.total)} of {binary(available)}"


def _reasons(before: Config, after: Config, why: str, shards: bool) -> tuple[str, ...]:
    """shards: several ranks, so that there is something to say of their sharding."""
    found = []
    if shards and before.train.sharding.strategy == "auto":
        sharding = after.train.sharding
        sync = {None: "", True: "", False: ", gradients reduced once a step"}[sharding.sync_every_microbatch]
        found.append(f"train.sharding.strategy auto: {sharding.strategy}{sync} ({why})")
    if before.train.activation_checkpointing.type == "auto":
        kind = after.train.activation_checkpointing.type
        found.append(f"train.activation_checkpointing auto: {kind} ({why})")
    if before.train.microbatch_size == "auto":
        found.append(f"train.microbatch_size auto: {after.train.microbatch_size} ({why})")
    return tuple(found)
