"""Choice of the launch parameters of a Triton kernel: rows of one table per architecture, in tables/. No torch here.

A row serves the kernel, number format and shape that it names, and shapes near them; select() states the rule. The user's
rows, from the file that LLMTRAIN_TUNING names or else from ~/.config/llmtrain/tuning/ARCH.yaml, come before the shipped
ones: `llmtrain bench tune` writes there. Files are read once; tuning_table.py is their model.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError
from llmtrain.kernels.platform import DTYPES, Platform, Vendor, shared_limit
from llmtrain.kernels.tuning_table import KERNELS, Row, Table, load

FOLDER = Path(__file__).with_name("tables")
TABLES: dict[Vendor, tuple[str, ...]] = {"nvidia": ("sm80", "sm90", "sm100"), "amd": ("gfx90a", "gfx942", "gfx950")}
"""Architectures with a table, oldest first."""

BY_ROWS: list[dict[Any, Any]] = []
"""What others keep that depends on rows."""

_NAMED, _TO_BE_MADE = "LLMTRAIN_TUNING", "LLMTRAIN_TUNING_TO_BE_MADE"


class Untuned(UserError):
    """No row of a tuning table can serve."""


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
    kernel: str, dtype: str, shape: Mapping[str, int], platform: Platform, seq_len: int | None = None,
    variant: str | None = None,
) -> Row:  # fmt: skip
    """The row to launch `kernel` by. Raises Untuned where none can serve, and UserError for a table that is wrong. Cached.

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


def exact(
    kernel: str, dtype: str, shape: Mapping[str, int], platform: Platform, variant: str | None = None
) -> Row | None:
    """The row of the device's own table for this very dtype, shape and variant, the user's before the shipped one; or None."""
    return _exact(kernel, dtype, tuple(shape[name] for name in KERNELS[kernel].shape), platform, variant)


def is_own(row: Row, platform: Platform) -> bool:
    """True for a row of the user's."""
    return row in own_rows(platform.arch)


def forward_backward(operation: str, dtype: str, shape: Mapping[str, int], platform: Platform) -> list[Any]:
    """Launch parameters of an operation that has a forward and a backward kernel."""
    return [select(f"{operation}.{kernel}", dtype, shape, platform).launch for kernel in ("forward", "backward")]


def table(platform: Platform) -> Table:
    """The shipped table that serves the platform."""
    return read_shipped(nearest(platform))


@functools.cache
def read_shipped(arch: str) -> Table:
    return load(FOLDER / f"{arch}.yaml", arch)


def own_file(arch: str) -> Path:
    """Path of the user's rows for this architecture, whether it exists or not."""
    if named := os.environ.get(_NAMED):
        return Path(named)
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "llmtrain" / "tuning" / f"{arch}.yaml"


def named_arch() -> str | None:
    """Architecture of the rows in the file that LLMTRAIN_TUNING names; None where it names none, or one that does not exist.

    Raises UserError for a file that is no tuning table.
    """
    named = os.environ.get(_NAMED)
    return load(Path(named), None, own=True).arch if named and Path(named).exists() else None


@contextlib.contextmanager
def to_be_made(file: Path) -> Iterator[None]:
    """Inside, and in processes that begin there, `file` need not exist if LLMTRAIN_TUNING names it: what runs inside makes it."""
    named = os.environ.get(_NAMED)
    if not named or Path(named).resolve() != file.resolve():
        yield
        return
    os.environ[_TO_BE_MADE] = named
    try:
        yield
    finally:
        del os.environ[_TO_BE_MADE]
        forget()  # else a file that was missing inside would count as empty ever after


def forget() -> None:
    """Read the files again at the next selection."""
    for cached in (_select, _exact, own_rows, read_shipped):
        cached.cache_clear()
    for kept in BY_ROWS:
        kept.clear()


@functools.cache
def own_rows(arch: str) -> tuple[Row, ...]:
    """The user's rows for this architecture. Raises UserError for a wrong file, and a missing one that LLMTRAIN_TUNING names."""
    file = own_file(arch)
    if not file.exists():
        named = os.environ.get(_NAMED)
        if named and named != os.environ.get(_TO_BE_MADE):
            raise UserError(
                f"{_NAMED} names {file}, which does not exist: unset it, or make the file by `llmtrain bench tune --out {file}`"
            )
        return ()
    return load(file, arch, own=True).rows


@functools.cache
def _select(
    kernel: str, dtype: str, shape: tuple[int, ...], platform: Platform, seq_len: int | None, variant: str | None
) -> Row:
    limit = shared_limit(platform.arch)
    own = own_rows(platform.arch)
    rows = [row for row in (*own, *table(platform).rows) if row.kernel == kernel]

    def serves(row: Row) -> bool:
        return (
            DTYPES[row.dtype] == DTYPES[dtype]
            and all(has >= wanted for has, wanted in zip(row.shape, shape, strict=True))
            and (limit is None or row.shared <= limit)
            and row.variant in (None, variant)
        )

    def distance(row: Row) -> tuple[float, ...]:
        larger = sum(math.log2(has / wanted) for has, wanted in zip(row.shape, shape, strict=True))
        longer = 1.5
        if row.seq_len is not None:
            longer = 2.0 if seq_len is None else abs(math.log2(row.seq_len / seq_len))
        return (larger, row not in own, row.dtype != dtype, row.variant != variant, longer)

    able = [row for row in rows if serves(row)]
    if not able:
        sizes = ", ".join(f"{name} {size}" for name, size in zip(KERNELS[kernel].shape, shape, strict=True))
        raise Untuned(
            f"no row of {nearest(platform)}'s tuning table serves {kernel} in {dtype} at {sizes} on {platform.arch}"
            f"{f' ({limit} bytes of shared memory)' if limit else ''}: run `llmtrain bench tune` there, or use another backend"
        )
    return min(able, key=distance)


@functools.cache
def _exact(kernel: str, dtype: str, shape: tuple[int, ...], platform: Platform, variant: str | None) -> Row | None:
    if platform.arch not in TABLES.get(platform.vendor, ()):
        return None
    rows, key = (*own_rows(platform.arch), *table(platform).rows), (kernel, dtype, shape, variant)
    return next((row for row in rows if (row.kernel, row.dtype, row.shape, row.variant) == key), None)


def _version(arch: str) -> tuple[int, ...]:
    """sm90: (9, 0); gfx90a: (9, 0, 10)."""
    digits = arch.removeprefix("sm").removeprefix("gfx")
    last = 2 if arch.startswith("gfx") else 1
    try:
        return (int(digits[:-last]), *(int(digit, 16) for digit in digits[-last:]))
    except ValueError:
        raise UserError(f"'{arch}' is no architecture that has a tuning table; use reference") from None
