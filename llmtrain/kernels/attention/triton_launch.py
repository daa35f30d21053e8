"""Launch parameters of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmtrain.kernels.options import Count, Flag, Options
from llmtrain.kernels.platform import Platform

Kernel = Literal["forward", "dq", "dkdv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")


@dataclass(frozen=True)
class Launch(Options):
    """block_m: queries, block_n: keys of a tile. num_stages: tiles in flight in a loop, through shared memory.

    use_tma: load tiles through tensor descriptors by Hopper's TMA where the tensors allow it.
    maxnreg: most registers per thread (NVIDIA only). dv_first, single_loop: of dkdv; see attention_dkdv.
    """

    block_m: Count
    block_n: Count
    num_warps: Count
    num_stages: Count
    use_tma: Flag = False
    maxnreg: Count | None = None
    dv_first: Flag = False
    single_loop: Flag = False

    def options(self, platform: Platform) -> dict[str, Any]:
        """Triton's own launch options, beside the kernel's arguments."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if platform.vendor == "amd":
            options["matrix_instr_nonkdim"] = 16
        elif self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options
