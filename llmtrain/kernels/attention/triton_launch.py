"""Launch parameters of the attention kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from llmtrain.kernels.options import Count, Flag, Options, Side, Warps
from llmtrain.kernels.platform import Platform

Kernel = Literal["forward", "dq", "dkdv"]
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")


@dataclass(frozen=True)
class Launch(Options):
    """block_m: queries, block_n: keys of a tile. num_stages: tiles in flight in a loop, through shared memory.

    use_tma: load tiles through tensor descriptors by Hopper's TMA where the tensors allow it.
    part: width of the tiles that make up head_dim, the last padded with zeros; None: powers of two that pad nothing.
    one_loop: all tiles in one loop, in which a branch masks those that need it. cudnn: of the forward, cuDNN's in its place.
    in_registers: of the tiles that a program loads in front of its loop (forward: q; dq: q and dO; dkdv: k and v), the first so
    many stay in registers, and take neither shared memory nor its bandwidth. For 16-bit numbers on Hopper.
    maxnreg: most registers per thread (NVIDIA only). dv_first, single_loop, split: of dkdv; see attention_dkdv. split:
    dk and dv in launches of their own, which takes half the registers, and q k^T once more; dv_block_m: block_m of dv's.
    """

    block_m: Side
    block_n: Side
    num_warps: Warps
    num_stages: Count
    use_tma: Flag = False
    maxnreg: Count | None = None
    dv_first: Flag = False
    single_loop: Flag = False
    one_loop: Flag = False
    part: Side | None = None
    split: Flag = False
    dv_block_m: Side | None = None
    cudnn: Flag = False
    in_registers: Annotated[int, Field(ge=0, le=2)] = 0

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        if self.cudnn and not (kernel == "attention.forward" and arch.startswith("sm")):
            return f"cudnn is for attention.forward on NVIDIA's GPUs, not for {kernel} on {arch}"
        if self.dv_block_m is not None and not self.split:
            return "dv_block_m is that of dv's own launch: it goes with split"
        return None

    def options(self, platform: Platform) -> dict[str, Any]:
        """Triton's own launch options, beside the kernel's arguments."""
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if platform.vendor == "amd":
            options["matrix_instr_nonkdim"] = 16
        elif self.maxnreg is not None:
            options["maxnreg"] = self.maxnreg
        return options


@dataclass(frozen=True)
class StoredLaunch(Options):
    """Backward pass by stored gradients of scores (stored_dscores.py). block_m: queries, block_n: keys of a tile.

    A chunk: at most `keys` keys and `queries` queries, of as many heads as make `rows` rows of keys (bytes: 2 * rows * queries).
    from_seq_len: shortest sequences for which it is the faster backward pass. use_tma: store tiles through tensor descriptors.
    """

    block_m: Side
    block_n: Side
    num_warps: Warps
    num_stages: Count
    rows: Count
    keys: Count
    queries: Count
    from_seq_len: Count
    use_tma: Flag = False

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        if self.queries % self.tile:
            return f"queries must be a multiple of block_m and block_n, and {self.queries} is none of {self.tile}"
        return None

    @property
    def tile(self) -> int:
        """Tokens of which chunks are multiples. So is `queries`."""
        return max(self.block_m, self.block_n)
