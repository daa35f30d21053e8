"""Choices for `auto` in train.sharding and train.activation_checkpointing: the fastest that fits, by the estimate of memory.py.

Shardings from fast to slow, as measured on two H200s over NVLink (MPT-1B; tokens/s kept of one GPU's): grad_op with one gradient
sync a step 97 %, grad_op 94 %, full 92 %. Over several nodes hybrid comes first, where only gradients cross the network, once a
step where that fits (not measured). Recomputation costs more than any of them: none, then selective, then full. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.flops.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.flops.units import binary
from llmtrain.schema.config import Config
from llmtrain.schema.training import ActivationCheckpointing, Sharding

USABLE = 0.88
"""Share of a GPU's memory that a choice may fill by the estimate: less than what is advised to a user who ran out of it, since a
choice that nobody made must not fail."""


@dataclass(frozen=True)
class Settled:
    """config: free of `auto`. reasons: a line for each choice, for the user; empty where there was none."""

    config: Config
    reasons: tuple[str, ...]


def settle(config: Config, sizes: ParameterSizes, world_size: int, local_size: int, available: float | None) -> Settled:
    """A config with every `auto` of sharding and recomputation replaced.

    local_size: ranks of one node. available: bytes of a GPU; None: without GPUs, where nothing is gained by more memory.
    """
    sharding, checkpointing = config.train.sharding, config.train.activation_checkpointing
    if sharding.strategy != "auto" and checkpointing.type != "auto":
        return Settled(config, ())
    candidates = [
        _with(config, kind, chosen)
        for kind, chosen in itertools.product(
            _recomputations(checkpointing), _shardings(config, world_size, local_size)
        )
    ]
    if available is None:
        chosen = _with(config, next(_recomputations(checkpointing)), _named(sharding, "full"))
        return Settled(chosen, _reasons(config, chosen, "no GPU"))
    limit = USABLE * available
    estimates = [(candidate, estimate_memory(candidate, sizes, world_size)) for candidate in candidates]
    fitting = next(((candidate, memory) for candidate, memory in estimates if memory.total <= limit), None)
    if fitting is None:
        chosen, memory = min(estimates, key=lambda estimate: estimate[1].total)
        why = f"takes the least, {_share(memory, available)}, and may be too much"
    else:
        chosen, memory = fitting
        why = f"the fastest that fits: {_share(memory, available)} by the estimate"
    if world_size == 1 and checkpointing.type != "auto":
        why = "one GPU"
    return Settled(chosen, _reasons(config, chosen, why))


def _share(memory: Memory, available: float) -> str:
    return f"{binary(memory.total)} of {binary(available)}"


def _reasons(before: Config, after: Config, why: str) -> tuple[str, ...]:
    found = []
    if before.train.sharding.strategy == "auto":
        sharding = after.train.sharding
        sync = {None: "", True: "", False: ", gradients reduced once a step"}[sharding.sync_every_microbatch]
        found.append(f"train.sharding.strategy auto: {sharding.strategy}{sync} ({why})")
    if before.train.activation_checkpointing.type == "auto":
        kind = after.train.activation_checkpointing.type
        found.append(f"train.activation_checkpointing auto: {kind} ({why})")
    return tuple(found)


def _recomputations(given: ActivationCheckpointing) -> Iterator[ActivationCheckpointing]:
    if given.type != "auto":
        yield given
        return
    for kind in ("none", "selective", "full"):
        yield ActivationCheckpointing.model_validate({"type": kind})


def _shardings(config: Config, world_size: int, local_size: int) -> Iterator[Sharding]:
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
    once_is_all = config.grad_accum(world_size) == 1
    for strategy in strategies:
        syncs = (False, True) if strategy != "full" and not once_is_all else (True,)
        for sync in syncs if given.sync_every_microbatch is None and world_size > 1 else (given.sync_every_microbatch,):
            shard_size = local_size if strategy == "hybrid" else None
            yield _named(given, strategy, sync_every_microbatch=sync, shard_size=shard_size)


def _named(given: Sharding, strategy: str, **fields: object) -> Sharding:
    return given.model_copy(update={"strategy": strategy, **fields}) if given.strategy == "auto" else given


def _with(config: Config, checkpointing: ActivationCheckpointing, sharding: Sharding) -> Config:
    train = config.train.model_copy(update={"activation_checkpointing": checkpointing, "sharding": sharding})
    return config.model_copy(update={"train": train})
