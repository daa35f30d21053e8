"""How the attention kernels are launched: tile sizes and the like, from the tuning tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmtrain.kernels import tuning
from llmtrain.kernels.platform import Platform

Kernel = Literal["forward", "dq", "dkdv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")


@dataclass(frozen=True)
class Launch:
    """block_m: queries, block_n: keys of a tile. stages: tiles in flight in a loop, through shared memory.

    described: let Hopper's copy engine fetch the tiles (through tensor descriptors) where the tensors allow it.
    registers: most per thread (NVIDIA only). dv_first, merged: of dkdv; see there.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    maxnreg: int | None = None
    dv_first: bool = False
    single_loop: bool = False

    def options(self, platform: Platform) -> dict[str, Any]:
        """What Triton takes beside the kernel's arguments."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if platform.vendor == "amd":
            options["matrix_instr_nonkdim"] = 16
        elif self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options


_INTERPRETED = Launch(32, 16, 4, 1)  # small tiles show their edges in small tests


def choose(
    kernel: Kernel,
    head_dim: int,
    dtype: str,
    platform: Platform,
    seq_len: int | None = None,
    variant: str | None = None,
) -> Launch:
    """What the tuning table says.

    variant: `plain`; the one thing beyond it: alibi, window, documents or softcap; or `mixed`, several, or no causality,
    which takes registers that the others can use for larger tiles; or `grouped`, of dkdv: any one of these where queries
    share heads of keys. None: rows that name no variant.
    """
    if platform.vendor == "cpu":
        return _INTERPRETED
    return tuning.select(f"attention.{kernel}", dtype, {"head_dim": head_dim}, platform, seq_len, variant).launch


def pairs_in_flight(platform: Platform, bytes_each: int, at_least: int = 1) -> int:
    """How many pairs of sequence and head should run side by side when each rereads `bytes_each`."""
    budget = (32 << 20) if platform.vendor == "cpu" else tuning.table(platform).l2_budget
    return max(1, budget // bytes_each) * at_least
