"""Choices for `auto` in train.sharding, train.activation_checkpointing and train.microbatch_size: the fastest that fits, by the
estimate of memory.py.

Shardings from fast to slow, as measured on two H200s over NVLink (MPT-1B; tokens/s kept of one GPU's): grad_op with one gradient
sync a step 98 %, grad_op 94 %, full 92 %. Over several nodes hybrid comes first, where only gradients cross the network, once a
step where that fits (not measured). Recomputation costs more than any of them, and a small microbatch as much as either: see
`_price`. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.flops.units import binary
from llmtrain.models.sections.float8 import MULTIPLE
from llmtrain.plan.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.schema.config import Config
from llmtrain.schema.training import ActivationCheckpointing, Sharding

USABLE = 0.88
"""Share of a GPU's memory that a choice may fill by the estimate: less than what is advised to a user who ran out of it, since a
choice that nobody made must not fail."""


_RECOMPUTED = {"selective": 1.12, "full": 1.3}
"""Time of a step with recomputation, relative to one without."""
_TOKENS_ON_CPU = 4096


@dataclass(frozen=True)
class ResolvedConfig:
    """config: free of `auto`. reasons: a line for each choice, for the user; empty where there was none."""

    config: Config
    reasons: tuple[str, ...]


def resolve_auto(
    config: Config, sizes: ParameterSizes, world_size: int, local_size: int, available: float | None
) -> ResolvedConfig:
    """A config with every `auto` of sharding, recomputation and microbatch replaced.

    local_size: ranks of one node. available: bytes of a GPU; None: without GPUs, where nothing is gained by more memory.
    Raises UserError where the batch cannot be split over the ranks.
    """
    train = config.train
    if "auto" not in (train.sharding.strategy, train.activation_checkpointing.type, train.microbatch_size):
        return ResolvedConfig(config, ())
    if available is None:
        allowed = microbatches(config, world_size)
        size = max((size for size in allowed if config.microbatch_tokens(size) <= _TOKENS_ON_CPU), default=allowed[0])
        chosen = _with(
            config, next(_recomputations(train.activation_checkpointing)), _named(train.sharding, "full"), size
        )
        return ResolvedConfig(chosen, _reasons(config, chosen, "no GPU", shards=world_size > 1))
    candidates = [
        (_price(config, rank, kind, size), _with(config, kind, sharding, size))
        for kind in _recomputations(train.activation_checkpointing)
        for size in microbatches(config, world_size)
        for rank, sharding in enumerate(_shardings(config, world_size, local_size, size))
    ]
    candidates.sort(key=lambda candidate: candidate[0])
    estimates = [(candidate, estimate_memory(candidate, sizes, world_size)) for _, candidate in candidates]
    limit = USABLE * available
    fitting = next(((candidate, memory) for candidate, memory in estimates if memory.total <= limit), None)
    if fitting is None:
        chosen, memory = min(estimates, key=lambda estimate: estimate[1].total)
        why = f"takes the least, {_share(memory, available)}, and may be too much"
    else:
        chosen, memory = fitting
        why = f"the fastest that fits: {_share(memory, available)} by the estimate"
    return ResolvedConfig(chosen, _reasons(config, chosen, why, shards=world_size > 1))


def microbatches(config: Config, world_size: int) -> list[int]:
    """Sizes that divide a rank's part of the global batch, rising; in float8 those of which products can be made. Raises UserError
    where there is none."""
    given = config.train.microbatch_size
    per_rank = config.grad_accum(world_size) * config.train.least_microbatch
    if given != "auto":
        return [given]
    multiple = MULTIPLE if config.train.float8 is not None else 1
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    sizes = [size for size in sizes if config.microbatch_tokens(size) % multiple == 0]
    if not sizes:
        raise UserError(
            f"train.microbatch_size auto: no part of a rank's {per_rank} sequences has a multiple of {multiple} tokens, as "
            "train.float8 needs"
        )
    return sizes


def _price(config: Config, sharding: int, kind: ActivationCheckpointing, size: int) -> float:
    """Relative time of a step. sharding: its place from the fastest on."""
    return (1 + 0.02 * sharding) * _RECOMPUTED.get(kind.type, 1) * (1 + 256 / config.microbatch_tokens(size))


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


def _recomputations(given: ActivationCheckpointing) -> Iterator[ActivationCheckpointing]:
    if given.type != "auto":
        yield given
        return
    for kind in ("none", "selective", "full"):
        yield ActivationCheckpointing.model_validate({"type": kind})


def _shardings(config: Config, world_size: int, local_size: int, microbatch: int) -> Iterator[Sharding]:
    """Candidates from fast to slow."""
    given = config.train.sharding
    if given.strategy != "auto":
        yield given
        return
    strategies = ["grad_op", "full"]
    if world_size > local_size and local_size % config.train.parallel.ranks == 0:
        strategies.insert(0, "hybrid")
    if world_size == 1:
        strategies = ["full"]
    once_is_all = config.grad_accum(world_size) * config.train.least_microbatch == microbatch
    for strategy in strategies:
        syncs = (False, True) if strategy != "full" and not once_is_all else (True,)
        for sync in syncs if given.sync_every_microbatch is None and world_size > 1 else (given.sync_every_microbatch,):
            shard_size = local_size if strategy == "hybrid" else None
            yield _named(given, strategy, sync_every_microbatch=sync, shard_size=shard_size)


def _named(given: Sharding, strategy: str, **fields: object) -> Sharding:
    return given.model_copy(update={"strategy": strategy, **fields}) if given.strategy == "auto" else given


def _with(config: Config, checkpointing: ActivationCheckpointing, sharding: Sharding, microbatch: int) -> Config:
    chosen = {"activation_checkpointing": checkpointing, "sharding": sharding, "microbatch_size": microbatch}
    train = config.train.model_copy(update=chosen)
    return config.model_copy(update={"train": train})
