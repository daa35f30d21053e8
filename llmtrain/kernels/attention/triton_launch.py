"""How the attention kernels are launched: tile sizes and the like, as data, by architecture, kernel and head_dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmtrain.kernels.platform import Platform

Kernel = Literal["forward", "dq", "dkdv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")


@dataclass(frozen=True)
class Launch:
    """block_m: queries, block_n: keys of a tile. stages: tiles in flight in a loop, through shared memory.

    described: let Hopper's copy engine fetch the tiles (through tensor descriptors) where the tensors allow it.
    registers: most per thread (NVIDIA only).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    described: bool = False
    registers: int | None = None

    def options(self, platform: Platform) -> dict[str, Any]:
        """What Triton takes beside the kernel's arguments."""
        options: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if platform.vendor == "amd":
            options["matrix_instr_nonkdim"] = 16
        elif self.registers is not None:
            options["maxnreg"] = self.registers
        return options


# (head_dim up to, launch), first match. Untuned: chosen among what compiles without spills, see bench/.
_HALF: dict[str, dict[Kernel, list[tuple[int, Launch]]]] = {
    "sm90": {
        "forward": [
            (64, Launch(128, 128, 8, 2, described=True)),
            (128, Launch(128, 64, 8, 3, described=True)),
            (160, Launch(128, 64, 8, 2)),
            (256, Launch(64, 64, 8, 2)),
        ],
        "dq": [
            (64, Launch(128, 64, 8, 3, described=True)),
            (128, Launch(128, 64, 8, 2, described=True)),
            (160, Launch(64, 64, 8, 2)),
            (256, Launch(64, 32, 8, 2)),
        ],
        "dkdv": [
            (64, Launch(64, 128, 8, 2, described=True)),
            (128, Launch(32, 128, 8, 2, described=True)),
            (256, Launch(32, 64, 8, 2)),
        ],
    },
    "sm80": {
        "forward": [(64, Launch(128, 64, 8, 3)), (128, Launch(128, 32, 8, 3)), (256, Launch(64, 32, 8, 2))],
        "dq": [(64, Launch(128, 64, 8, 2)), (128, Launch(64, 64, 8, 2)), (256, Launch(64, 32, 8, 2))],
        "dkdv": [(64, Launch(32, 128, 8, 2)), (128, Launch(32, 64, 8, 2)), (256, Launch(16, 64, 8, 2))],
    },
    "gfx942": {
        "forward": [(64, Launch(128, 64, 4, 1)), (128, Launch(128, 64, 4, 1)), (256, Launch(64, 32, 4, 1))],
        "dq": [(64, Launch(64, 64, 4, 1)), (128, Launch(64, 64, 4, 1)), (256, Launch(64, 32, 4, 1))],
        "dkdv": [(64, Launch(64, 64, 4, 1)), (128, Launch(32, 64, 4, 1)), (256, Launch(16, 64, 4, 1))],
    },
}
_HALF["gfx90a"] = _HALF["gfx942"]

_SINGLE: dict[Kernel, list[tuple[int, Launch]]] = {
    "forward": [(128, Launch(64, 32, 4, 1)), (256, Launch(32, 32, 4, 1))],
    "dq": [(128, Launch(32, 32, 4, 1)), (256, Launch(32, 16, 4, 1))],
    "dkdv": [(128, Launch(32, 32, 4, 1)), (256, Launch(16, 32, 4, 1))],
}
_INTERPRETED = Launch(32, 16, 4, 1)  # small tiles show their edges in small tests

# Of the L2 cache, what the tiles read again and again by programs that run at once may take.
_SHARED_CACHE = {"sm90": 32 << 20, "sm80": 24 << 20, "gfx942": 128 << 20, "gfx90a": 4 << 20}


def choose(kernel: Kernel, head_dim: int, dtype: str, platform: Platform) -> Launch:
    """The row for this architecture; for one without rows, that of the nearest older of its vendor."""
    if platform.vendor == "cpu":
        return _INTERPRETED
    rows = _SINGLE if dtype == "float32" else _HALF[_nearest(platform)]
    return next(launch for most, launch in rows[kernel] if head_dim <= most)


def together(platform: Platform, bytes_each: int, at_least: int = 1) -> int:
    """How many pairs of sequence and head should run side by side when each rereads `bytes_each`."""
    budget = (32 << 20) if platform.vendor == "cpu" else _SHARED_CACHE[_nearest(platform)]
    return max(1, budget // bytes_each) * at_least


def _nearest(platform: Platform) -> str:
    if platform.vendor == "amd":
        return platform.arch if platform.arch in _HALF else "gfx942"
    return "sm90" if int(platform.arch.removeprefix("sm")) >= 90 else "sm80"
