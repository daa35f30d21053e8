"""Which launch parameters a Triton kernel runs with: rows of one table per architecture, in tables/. No torch here.

A row serves the kernel, number format and shape that it names, and shapes near them; select() states the rule. Rows of
one's own, from the file that LLMTRAIN_TUNING names or else from ~/.config/llmtrain/tuning/ARCH.yaml, come before the
shipped ones: `llmtrain bench tune` writes there. Files are read once.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, Vendor, shared_limit

FOLDER = Path(__file__).with_name("tables")
TABLES: dict[Vendor, tuple[str, ...]] = {"nvidia": ("sm80", "sm90"), "amd": ("gfx90a", "gfx942")}
"""Architectures with a table, oldest first."""

_ATTENTION = "llmtrain.kernels.attention.triton_launch:Launch"
_CONV = "llmtrain.kernels.conv1d.triton_launch:Walk"
_GATED_NORM = "llmtrain.kernels.gated_norm.triton_launch:Tile"
_NORM = "llmtrain.kernels.row_tiles:Tile"
_WIDE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Kernel:
    """What the rows of a kernel hold. shape: names of its sizes; launch: the dataclass of its parameters."""

    shape: tuple[str, ...]
    launch: str


KERNELS: dict[str, Kernel] = {
    "attention.forward": Kernel(("head_dim",), _ATTENTION),
    "attention.dq": Kernel(("head_dim",), _ATTENTION),
    "attention.dkdv": Kernel(("head_dim",), _ATTENTION),
    # All kernels of a scan: they hand each other chunks of one size.
    "ssd": Kernel(("head_dim", "d_state"), "llmtrain.kernels.ssd.triton_launch:Launch"),
    # Channels are in no key: what a program does is the same for any number of them.
    "conv1d.forward": Kernel(("width",), _CONV),
    "conv1d.backward": Kernel(("width",), _CONV),
    "gated_norm.forward": Kernel(("group_size",), _GATED_NORM),
    "gated_norm.backward": Kernel(("group_size",), _GATED_NORM),
    "norm.forward": Kernel(("dim",), _NORM),
    "norm.backward": Kernel(("dim",), _NORM),
    # Both directions: the gradient is a rotation.
    "rotary": Kernel(("head_dim",), "llmtrain.kernels.rotary.triton_launch:Launch"),
}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    shape: sizes, in the order of Kernel.shape. seq_len, variant: None: any.
    shared: bytes of shared memory that a program takes at this shape, the most of its kernels.
    provenance: `compiled only`, or how it was measured: device, date, commit, ms, tflops or gbps.
    """

    kernel: str
    dtype: str
    shape: tuple[int, ...]
    launch: Any
    shared: int
    provenance: str | Mapping[str, Any]
    seq_len: int | None = None
    variant: str | None = None
    own: bool = False
    """From the user's file."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Two rows of one table with the same key contradict each other."""
        return (self.kernel, self.dtype, self.shape, self.seq_len, self.variant)

    @property
    def label(self) -> str:
        sizes = [f"{name}={size}" for name, size in zip(KERNELS[self.kernel].shape, self.shape, strict=True)]
        more = [f"seq_len={self.seq_len}"] * (self.seq_len is not None) + [self.variant] * (self.variant is not None)
        return " ".join(filter(None, [self.kernel, self.dtype, *sizes, *more]))


@dataclass(frozen=True)
class Table:
    """l2_budget: bytes of the L2 cache that tiles may take which programs that run at once read again and again."""

    arch: str
    l2_budget: int
    rows: tuple[Row, ...]


def nearest(platform: Platform) -> str:
    """The architecture whose table serves this one: its own, or the newest that is older and of the same kind.

    Raises UserError where there is none.
    """
    known = TABLES.get(platform.vendor, ())
    if platform.arch in known:
        return platform.arch
    version = _version(platform.arch)
    if version[:1] == (12,) and platform.vendor == "nvidia":
        return "sm80"  # without Hopper's matrix and copy instructions, and with sm86's memory
    older = [arch for arch in known if _version(arch) <= version]
    if not older or (platform.vendor == "amd" and version[0] != 9):
        tables = ", ".join(known) or ", ".join(arch for archs in TABLES.values() for arch in archs)
        raise UserError(f"no tuning table serves {platform.vendor} {platform.arch}: there are {tables}; use reference")
    return older[-1]


def select(
    kernel: str,
    dtype: str,
    shape: Mapping[str, int],
    platform: Platform,
    seq_len: int | None = None,
    variant: str | None = None,
) -> Row:
    """The row to launch `kernel` by. Raises UserError where none can serve. Cached.

    Can serve: rows of the kernel, for numbers as wide, for sizes that are all as large or larger (tiles are cut to the
    shape, so they then fit in shared memory and registers too), that fit in this device's shared memory, and that name
    no variant or this one. Of these the first by, in this order:
    1. shape: the sum over sizes of log2(row / asked), least first;
    2. the user's rows before the shipped ones;
    3. the same dtype before another as wide;
    4. the same variant before none;
    5. seq_len: |log2(row / asked)|; a row without one counts as 1.5, so it comes after one within a factor 2.8.
    """
    return _select(kernel, dtype, tuple(shape[name] for name in KERNELS[kernel].shape), platform, seq_len, variant)


def table(platform: Platform) -> Table:
    """The shipped table that serves the platform."""
    return read_shipped(nearest(platform))


@functools.cache
def read_shipped(arch: str) -> Table:
    return read(FOLDER / f"{arch}.yaml", arch)


def own_file(arch: str) -> Path:
    """Where the user's rows for this architecture are, or would be."""
    if named := os.environ.get("LLMTRAIN_TUNING"):
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "llmtrain" / "tuning" / f"{arch}.yaml"


def forget() -> None:
    """Read the files again at the next selection."""
    for cached in (_select, _own_rows, read_shipped):
        cached.cache_clear()


@functools.cache
def _own_rows(arch: str) -> tuple[Row, ...]:
    file = own_file(arch)
    if not file.exists():
        if "LLMTRAIN_TUNING" in os.environ:
            raise UserError(f"LLMTRAIN_TUNING names {file}, which does not exist: unset it, or run llmtrain bench tune")
        return ()
    return read(file, arch, own=True).rows


@functools.cache
def _select(
    kernel: str, dtype: str, shape: tuple[int, ...], platform: Platform, seq_len: int | None, variant: str | None
) -> Row:
    limit = shared_limit(platform.arch)
    rows = [row for row in (*_own_rows(platform.arch), *table(platform).rows) if row.kernel == kernel]

    def serves(row: Row) -> bool:
        return (
            _WIDE[row.dtype] == _WIDE[dtype]
            and all(has >= wanted for has, wanted in zip(row.shape, shape, strict=True))
            and (limit is None or row.shared <= limit)
            and row.variant in (None, variant)
        )

    def distance(row: Row) -> tuple[float, ...]:
        larger = sum(math.log2(has / wanted) for has, wanted in zip(row.shape, shape, strict=True))
        longer = 1.5
        if row.seq_len is not None:
            longer = 2.0 if seq_len is None else abs(math.log2(row.seq_len / seq_len))
        return (larger, not row.own, row.dtype != dtype, row.variant != variant, longer)

    able = [row for row in rows if serves(row)]
    if not able:
        sizes = ", ".join(f"{name} {size}" for name, size in zip(KERNELS[kernel].shape, shape, strict=True))
        raise UserError(
            f"no row of {nearest(platform)}'s tuning table serves {kernel} in {dtype} at {sizes} on {platform.arch}"
            f"{f' ({limit} bytes of shared memory)' if limit else ''}: run `llmtrain bench tune` there, or use another backend"
        )
    return min(able, key=distance)


def _version(arch: str) -> tuple[int, ...]:
    """sm90: (9, 0); gfx90a: (9, 0, 10)."""
    digits = arch.removeprefix("sm").removeprefix("gfx")
    last = 2 if arch.startswith("gfx") else 1
    try:
        return (int(digits[:-last]), *(int(digit, 16) for digit in digits[-last:]))
    except ValueError:
        raise UserError(f"'{arch}' is no architecture that has a tuning table; use reference") from None


def read(file: Path, arch: str, own: bool = False) -> Table:
    """Raises UserError that names the file, the row and what is wrong with it."""
    from llmtrain.kernels.tuning_files import load

    return load(file, arch, own)
