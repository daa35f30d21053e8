"""Settings that leave a run's results as they are and change its memory and speed: the candidates of `auto` (automatic.py), and of
the advice to a user whose run does not fit (fitting.py). No torch here.

A dimension is a setting with the values that it may take: any, where the config says `auto`; otherwise the given one and, for
advice, those that take less memory.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.models.sections.float8 import MULTIPLE
from llmtrain.schema.config import Config
from llmtrain.schema.training import ActivationCheckpointing, Sharding

CHOSEN, ADVISED, MEASURED = 0.88, 0.92, 0.95
"""Shares of a GPU's memory that a run may fill; the driver's context, communication and fragmentation take the rest. CHOSEN: by
the estimate, where nobody made the choice, so that it must not fail. ADVISED: by the estimate, of settings that a user may try.
MEASURED: extrapolated from what a smaller microbatch took on this GPU (train/microbatch.py)."""

RECOMPUTED = {"selective": 1.12, "full": 1.3}
"""Time of a step with recomputation, relative to one without."""


@dataclass(frozen=True)
class Override:
    """A value of one or several settings. settings: those that differ from the config's, as on the command line. train, optimizer:
    the fields that it sets. price: its cost in words. time: a step's, relative to that of the fastest value."""

    settings: tuple[str, ...] = ()
    train: tuple[tuple[str, object], ...] = ()
    price: str = ""
    optimizer: tuple[tuple[str, object], ...] = ()
    time: float = 1.0


@dataclass(frozen=True)
class Candidate:
    """config: with the values of `overrides`, one of each dimension."""

    config: Config
    overrides: tuple[Override, ...]

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(setting for override in self.overrides for setting in override.settings)

    @property
    def price(self) -> str:
        return ", ".join(override.price for override in self.overrides if override.price)

    @property
    def time(self) -> float:
        """A step's, relative to the other candidates'."""
        found = 1.0
        for override in self.overrides:
            found *= override.time
        return found * (1 + 256 / self.config.microbatch_tokens(self.config.train.least_microbatch))


def candidates_of_auto(config: Config, world_size: int, local_size: int, gpus: bool) -> Iterator[Candidate]:
    """Every combination of values for what is `auto`. local_size: ranks of one node. gpus: without them nothing is gained by
    gathering parameters less often."""
    for size in microbatches(config, world_size):
        shardings = _auto_shardings(config, world_size if gpus else 1, local_size, size)
        for overrides in itertools.product(shardings, _auto_recomputations(config), [_microbatch(size)]):
            yield _with(config, overrides)


def candidates_of_less_memory(config: Config, world_size: int) -> Iterator[Candidate]:
    """Every combination of the given values and of those that take less memory. config: without `auto`."""
    dimensions = (
        _frugal_losses(config),
        _frugal_shardings(config, world_size),
        _frugal_recomputations(config),
        _smaller_microbatches(config, world_size),
        _frugal_optimizers(config),
    )
    for overrides in itertools.product(*([Override(), *dimension] for dimension in dimensions)):
        if any(override.settings for override in overrides):
            yield _with(config, overrides)


def microbatches(config: Config, world_size: int) -> list[int]:
    """Sizes that divide a rank's part of the global batch, rising; in float8 those of which products can be made. Raises UserError
    where there is none."""
    given = config.train.microbatch_size
    if given != "auto":
        return [given]
    multiple = MULTIPLE if config.train.float8 is not None else 1
    per_rank = _per_rank(config, world_size)
    sizes = [size for size in _divisors(per_rank) if config.microbatch_tokens(size) % multiple == 0]
    if not sizes:
        raise UserError(
            f"train.microbatch_size auto: no part of a rank's {per_rank} sequences has a multiple of {multiple} tokens, as "
            "train.float8 needs"
        )
    return sizes


def _per_rank(config: Config, world_size: int) -> int:
    return config.grad_accum(world_size) * config.train.least_microbatch


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _with(config: Config, overrides: Sequence[Override]) -> Candidate:
    train = dict(field for override in overrides for field in override.train)
    optimizer = dict(field for override in overrides for field in override.optimizer)
    changed = {
        "train": config.train.model_copy(update=train),
        "optimizer": config.optimizer.model_copy(update=optimizer),
    }
    return Candidate(config.model_copy(update=changed), tuple(overrides))


def _microbatch(size: int) -> Override:
    return Override(train=(("microbatch_size", size),))


def _auto_recomputations(config: Config) -> list[Override]:
    given = config.train.activation_checkpointing
    kinds = (
        [given]
        if given.type != "auto"
        else [ActivationCheckpointing.model_validate({"type": kind}) for kind in ("none", "selective", "full")]
    )
    return [Override(train=(("activation_checkpointing", kind),), time=RECOMPUTED.get(kind.type, 1)) for kind in kinds]


def _auto_shardings(config: Config, world_size: int, local_size: int, microbatch: int) -> list[Override]:
    """Values of sharding, from fast to slow."""
    given = config.train.sharding
    found: list[Sharding] = []
    if given.strategy != "auto":
        found.append(given)
    else:
        strategies = ["grad_op", "full"]
        if world_size > local_size and local_size % config.train.parallel.unit == 0:
            strategies.insert(0, "hybrid")
        if world_size == 1:
            strategies = ["full"]
        once_is_all = world_size > 1 and _per_rank(config, world_size) == microbatch
        for strategy in strategies:
            syncs = (False, True) if strategy != "full" and not once_is_all else (True,)
            if given.sync_every_microbatch is not None or world_size == 1:
                syncs = (given.sync_every_microbatch,)
            shard_size = local_size if strategy == "hybrid" else None
            found += [
                given.model_copy(update={"strategy": strategy, "sync_every_microbatch": sync, "shard_size": shard_size})
                for sync in syncs
            ]
    return [Override(train=(("sharding", one),), time=1 + 0.02 * rank) for rank, one in enumerate(found)]


def _frugal_losses(config: Config) -> Iterator[Override]:
    if config.train.loss.type == "plain":
        loss = config.train.loss.model_copy(update={"type": "chunked"})
        yield Override(("train.loss.type=chunked",), (("loss", loss),))


def _frugal_shardings(config: Config, world_size: int) -> Iterator[Override]:
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


def _frugal_recomputations(config: Config) -> Iterator[Override]:
    current = config.train.activation_checkpointing
    prices = {}
    if current.type in ("none", "every_k", "budget"):
        prices["selective"] = "a part of the forward pass runs twice"
    if current.type != "full":
        prices["full"] = "the forward pass runs twice, about a third more work"
    given = [f"{name}=null" for name in ("k", "fraction", "mlp_tokens") if getattr(current, name) is not None]
    given += ["offload=false"] if current.offload else []
    for kind, price in prices.items():
        changed = ActivationCheckpointing.model_validate({"type": kind})
        settings = tuple(f"train.activation_checkpointing.{setting}" for setting in (f"type={kind}", *given))
        yield Override(settings, (("activation_checkpointing", changed),), price)


def _smaller_microbatches(config: Config, world_size: int) -> Iterator[Override]:
    for size in reversed(_divisors(_per_rank(config, world_size))):
        if size < config.train.least_microbatch:
            yield Override((f"train.microbatch_size={size}",), (("microbatch_size", size),), "smaller products")


def _frugal_optimizers(config: Config) -> Iterator[Override]:
    if not config.optimizer.offload:
        price = "the optimizer's state crosses the bus at each step"
        yield Override(("optimizer.offload=true",), (), price, (("offload", True),))
