"""Settings by which a run would fit a GPU's memory, by the estimate of memory.py. No torch here."""

import contextlib
from dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.plan.candidates import candidates_of_less_memory
from llmtrain.plan.memory import Memory, ParameterSizes, estimate_memory
from llmtrain.schema.config import Config


@dataclass(frozen=True)
class Fit:
    """settings: as on the command line, `a.b=c`. price: what they cost, in words. memory: estimated with them, in bytes."""

    settings: tuple[str, ...]
    price: str
    memory: Memory


def plans_that_fit(config: Config, sizes: ParameterSizes, world_size: int, limit: float, most: int = 3) -> list[Fit]:
    """Up to `most` ways to stay below `limit` bytes per GPU, the cheapest first; each changes something that others do not. Empty
    where no candidate is enough.
    """
    found: list[Fit] = []
    for candidate in candidates_of_less_memory(config, world_size):
        memory = estimate_memory(candidate.config, sizes, world_size)
        if memory.total <= limit:
            found.append(Fit(candidate.settings, candidate.price, memory))
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
