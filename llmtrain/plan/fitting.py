"""Settings by which a run would fit a GPU's memory, by the estimate of memory.py. No torch here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.plan.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.schema.config import Config
from llmtrain.schema.training import ActivationCheckpointing

USABLE = 0.92
"""Share of a GPU's memory that an estimate may fill: the driver's context, communication and fragmentation take the rest."""


@dataclass(frozen=True)
class Fit:
    """settings: as on the command line, `a.b=c`. price: what they cost, in words. memory: estimated with them, in bytes."""

    settings: tuple[str, ...]
    price: str
    memory: Memory


@dataclass(frozen=True)
class Override:
    """settings, and the fields of `train` and of `optimizer` that they set. price: "" for none."""

    settings: tuple[str, ...] = ()
    fields: tuple[tuple[str, object], ...] = ()
    price: str = ""
    optimizer: tuple[tuple[str, object], ...] = ()


def plans_that_fit(config: Config, sizes: ParameterSizes, world_size: int, limit: float, most: int = 3) -> list[Fit]:
    """Up to `most` ways to stay below `limit` bytes per GPU, the cheapest first; each changes something that others do not.

    Only what changes no result is changed: how a loss is chunked, what is sharded and recomputed, the size of a microbatch, where
    the optimizer's state waits.
    Empty where nothing of that is enough.
    """
    found: list[Fit] = []
    for changes in itertools.product(
        _losses(config),
        _shardings(config, world_size),
        _recomputations(config),
        _microbatches(config, world_size),
        _optimizers(config),
    ):
        settings = tuple(setting for change in changes for setting in change.settings)
        if not settings:
            continue
        changed = {
            "train": config.train.model_copy(update=dict(field for change in changes for field in change.fields)),
            "optimizer": config.optimizer.model_copy(
                update=dict(one for change in changes for one in change.optimizer)
            ),
        }
        memory = estimate_memory(config.model_copy(update=changed), sizes, world_size)
        if memory.total <= limit:
            price = ", ".join(change.price for change in changes if change.price)
            found.append(Fit(settings, price, memory))
    # Fewest changes first, then the most memory in use: the largest microbatch, the least recomputation.
    found.sort(key=lambda fit: (len(fit.settings), -fit.memory.total))
    chosen: list[Fit] = []
    for fit in found:
        keys = {_key(setting) for setting in fit.settings}
        if not any({_key(setting) for setting in other.settings} <= keys for other in chosen):
            chosen.append(fit)
    return chosen[:most]


def ranks_that_fit(
    config: Config, sizes: ParameterSizes, world_size: int, limit: float, most: int = 4096
) -> tuple[int, tuple[str, ...]] | None:
    """The least number of GPUs, twice as many at a time, over which the run would fit, and the settings with which it then
    does (none, if it does as it is). None up to `most`."""
    while (world_size := 2 * world_size) <= most:
        if estimate_memory(config, sizes, world_size).total <= limit:
            return world_size, ()
        with contextlib.suppress(UserError):  # the batch cannot be split over so many
            if found := plans_that_fit(config, sizes, world_size, limit, most=1):
                return world_size, found[0].settings
    return None


def _key(setting: str) -> str:
    return setting.partition("=")[0]


def _losses(config: Config) -> Iterator[Override]:
    yield Override()
    if config.train.loss.type == "plain":
        loss = config.train.loss.model_copy(update={"type": "chunked"})
        yield Override(("train.loss.type=chunked",), (("loss", loss),))


def _shardings(config: Config, world_size: int) -> Iterator[Override]:
    yield Override()
    sharding = config.train.sharding
    if world_size == 1:
        return
    settings = {}
    if sharding.strategy not in ("full", "auto"):
        settings["strategy"] = "full"
    if sharding.sync_every_microbatch is False:
        settings["sync_every_microbatch"] = True
    if settings:
        changed = sharding.model_copy(update={"shard_size": None} | settings)
        names = [f"train.sharding.{key}={str(value).lower()}" for key, value in settings.items()]
        names += ["train.sharding.shard_size=null"] if sharding.shard_size is not None else []
        yield Override(tuple(names), (("sharding", changed),), "more communication")


def _recomputations(config: Config) -> Iterator[Override]:
    yield Override()
    current = config.train.activation_checkpointing.type
    if current in ("none", "every_k", "budget"):
        yield _checkpointing(config, "selective", "a part of the forward pass runs twice")
    if current != "full":
        yield _checkpointing(config, "full", "the forward pass runs twice, about a third more work")


def _checkpointing(config: Config, kind: str, price: str) -> Override:
    changed = ActivationCheckpointing.model_validate({"type": kind})
    current = config.train.activation_checkpointing
    given = [f"{name}=null" for name in ("k", "fraction", "mlp_tokens") if getattr(current, name) is not None]
    given += ["offload=false"] if current.offload else []
    settings = tuple(f"train.activation_checkpointing.{setting}" for setting in (f"type={kind}", *given))
    return Override(settings, (("activation_checkpointing", changed),), price)


def _microbatches(config: Config, world_size: int) -> Iterator[Override]:
    yield Override()
    per_rank = config.grad_accum(world_size) * config.train.least_microbatch
    for size in range(config.train.least_microbatch - 1, 0, -1):
        if per_rank % size == 0:
            yield Override((f"train.microbatch_size={size}",), (("microbatch_size", size),), "smaller products")


def _optimizers(config: Config) -> Iterator[Override]:
    yield Override()
    if not config.optimizer.offload:
        price = "the optimizer's state crosses the bus at each step"
        yield Override(("optimizer.offload=true",), (), price, (("offload", True),))
