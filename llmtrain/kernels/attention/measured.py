"""Measured times of attention backends, by which `auto` chooses: rows of one CSV per architecture, in tables/. No torch here.

A cell is one layer's attention at one length; its rows are its backends. A cell applies to a spec of the same head_dim, the same
features (ALiBi, softcap, window, documents), numbers as wide and a like number of query heads per key head; of several the one
nearest in length and window, those first in which ours was measured beside public backends. Where ALiBi or a softcap comes with
features or a number of heads that no cell has with it, cells that lack the fewest of these apply. The user's cells, in
FILE.attention.csv beside his own tuning rows FILE.yaml, come before shipped ones that are as near: `llmtrain bench tune FILE.yaml`
writes there. Rows of one architecture do not apply to another.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import read_bounded

DEFAULT_SEQ_LEN = 4096
"""Length that is assumed where a model is built for no certain one."""
OURS = "triton"
MARGIN, MARGIN_ELSEWHERE, MARGIN_FILLED = 1.05, 1.1, 1.25
"""Least advantage for which ours is taken over a public kernel: by a cell of the very shape; by one of other heads or another
length; for a length that is no multiple of 128, up to which ours copies tensors. At two shapes that no cell has, ours was 0.84 and
0.89 times as fast as a public kernel where the nearest cells said 1.07 and, of whole tiles, 1.18."""
HOST_MS = 0.08
"""Least time that ours must save beside that, for as many heads as are asked for. Times of cells are the device's; called eagerly,
ours takes the host up to 0.5 ms longer (`wall_ms` of the measured grid), so that cells that gain less are slower by the clock.
Not so beside varlen of documents, for which the host waits for the GPU once a microbatch: CUDA graphs, where launches cost the host
nothing, can have ours alone. So there MARGIN is enough, too, for other heads and whole tiles of another length."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def _none_if_empty(text: object) -> object:
    return None if text == "" else text


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Cell:
    """One layer's attention at one length. window: None: none."""

    dtype: Annotated[str, Field(pattern="^(bfloat16|float16|float32)$")]
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    alibi: bool
    softcap: bool
    documents: bool
    window: Annotated[PositiveInt | None, BeforeValidator(_none_if_empty)]
    seq_len: PositiveInt

    @classmethod
    def of(cls, spec: AttentionSpec, seq_len: int) -> Cell:
        window = None if spec.sliding_window is None else min(spec.sliding_window, seq_len)
        return cls(
            dtype=spec.dtype, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim,
            alibi=spec.alibi_max_bias is not None, softcap=spec.softcap is not None, documents=spec.documents,
            window=window, seq_len=seq_len,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.n_heads // self.n_kv_heads

    @property
    def grouping(self) -> int:
        """Class of the number of query heads per key head: 1 to 4, 5 to 16, or more. From 1 to 4, no backend's time per query head
        differs by more than a twentieth in the grid, but Flex's with one key head is half as much again."""
        return sum(self.group > most for most in (4, 16))

    @property
    def features(self) -> frozenset[str]:
        has = {"alibi": self.alibi, "softcap": self.softcap, "documents": self.documents, "window": self.window}
        return frozenset(name for name in has if has[name])

    def missing_features(self, other: Cell) -> int | None:
        """Features of `other` that this cell is without, and one more for another grouping; None where this cell does not apply
        to the other: it has a feature more, or lacks some and has neither ALiBi nor a softcap, or neither has a feature, but
        another grouping. With a feature, ours is ahead by nearly as much in all groupings of the grid; of several features ALiBi
        and the softcap decide, which only Flex and ours serve: at two combinations of a softcap ours was 1.41 and 1.81 times as
        fast as Flex, 2.3 and 2.1 times by the cells of a softcap alone.
        """
        lacking, regrouped = len(other.features - self.features), self.grouping != other.grouping
        if self.features - other.features or (lacking and not self.features & {"alibi", "softcap"}):
            return None
        return None if regrouped and not other.features else lacking + regrouped

    def distance(self, other: Cell) -> float:
        """Octaves between the lengths and between the windows."""
        far = abs(math.log2(self.seq_len / other.seq_len))
        if self.window is not None and other.window is not None:
            far += abs(math.log2(self.window / other.window))
        return far

    def other_heads(self, other: Cell) -> float:
        """Octaves between the query heads per key head, and between the query heads."""
        return abs(math.log2(self.group / other.group)) + abs(math.log2(self.n_heads / other.n_heads))

    @property
    def label(self) -> str:
        words = ["documents"] * self.documents + ["ALiBi"] * self.alibi + ["softcap"] * self.softcap
        words += [f"window {self.window}"] * (self.window is not None)
        return f"{self.n_heads} on {self.n_kv_heads} x {self.head_dim}, {', '.join(words) or 'plain'}, T={self.seq_len}"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row(Cell):
    """The times of one backend: medians of the device's own time, with a cold L2 cache."""

    backend: str
    forward_ms: PositiveFloat
    backward_ms: PositiveFloat
    device: str
    date: str
    commit: str

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def cell(self) -> Cell:
        return Cell(**{field.name: getattr(self, field.name) for field in fields(Cell)})


_ROWS = TypeAdapter(list[Row])


def fastest(spec: AttentionSpec, able: Collection[str], platform: Platform, seq_len: int | None = None) -> list[Row]:
    """Rows of the cell that applies to `spec`, of the backends in `able` alone, the one to take first, then the fastest; none
    where no such cell is measured, of ours beside at least one public backend. The same on every rank that has the same tables.
    """
    by_parts = spec.lower_right and not replace(spec, softcap=None).only_causal  # which no cell is like
    if by_parts or spec.value_dim is not None or platform.vendor == "cpu":
        return []
    asked = Cell.of(spec, seq_len or DEFAULT_SEQ_LEN)
    width = (_BYTES[asked.dtype], asked.head_dim)
    own, shipped = (_by_width(file).get(width, {}) for file in (own_file(platform.arch), shipped_file(platform.arch)))
    found = []
    for not_own, cells in enumerate((own, shipped)):
        for cell, rows in cells.items():
            here = [row for row in rows if row.backend in able]
            missing = cell.missing_features(asked)
            if missing is not None and any(row.backend != OURS for row in here):
                public_alone = not_own and all(row.backend != OURS for row in here)
                found.append((missing, public_alone, asked.distance(cell), not_own, asked.other_heads(cell), here))
    if not found:
        return []
    rows = sorted(min(found, key=lambda one: one[:-1])[-1], key=lambda row: (row.ms, row.backend))
    public = next(row for row in rows if row.backend != OURS)
    if rows[0].backend == OURS and not _is_worth_it(rows[0], public, asked):
        rows = [public, *(row for row in rows if row != public)]
    return rows


def _is_worth_it(ours: Row, public: Row, asked: Cell) -> bool:
    """True if ours is as much faster than the best public kernel as MARGIN and HOST_MS ask. asked: the cell that is served."""
    host_waits = public.backend == "varlen" and asked.documents
    if asked.seq_len % 128:
        margin = MARGIN_FILLED
    elif host_waits or public.cell == asked:
        margin = MARGIN
    else:
        margin = MARGIN_ELSEWHERE
    to_save = 0.0 if host_waits else HOST_MS * public.n_heads / asked.n_heads
    return public.ms >= margin * ours.ms + to_save


def own_file(arch: str) -> Path:
    """Path of the user's cells for this architecture, whether it exists or not."""
    return tuning.own_file(arch).with_suffix(".attention.csv")


def read(file: Path) -> list[Row]:
    """Rows of a file; none if it does not exist. Raises UserError for the first row that is wrong, and for a file that is no
    table."""
    if not file.exists():
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(read_bounded(file).decode(), newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"cannot read the measured attention {file}: {error}; repair or remove the file") from None
    if any(None in row for row in rows):
        number = next(number for number, row in enumerate(rows, 2) if None in row)
        raise UserError(f"{file}, line {number}: more values than the first line has names; repair or remove the file")
    try:
        return _ROWS.validate_python(rows)
    except ValidationError as error:
        at, *field = error.errors()[0]["loc"]
        where = f"{file}, line {int(at) + 2}: " + f"{'.'.join(map(str, field))}: "
        raise UserError(f"{where}{error.errors()[0]['msg']}; repair or remove the file") from None


def save(file: Path, rows: Iterable[Row]) -> None:
    """Write rows into `file`, in place of those of the same cell and backend; the rest stays."""
    kept = {(row.cell, row.backend): row for row in (*read(file), *rows)}
    ordered = sorted(kept.values(), key=lambda row: (row.head_dim, row.label, row.n_heads, row.ms))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with temporary.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(field.name for field in fields(Row))
        for row in ordered:
            values = (getattr(row, field.name) for field in fields(Row))
            writer.writerow([int(value) if isinstance(value, bool) else value for value in values])
    temporary.replace(file)
    _by_width.cache_clear()


def discard(file: Path, unwanted: Callable[[Row], bool]) -> None:
    """Take rows out of `file`, if it exists."""
    kept = [row for row in read(file) if not unwanted(row)]
    if file.exists():
        file.unlink()
        save(file, kept)


def shipped_file(arch: str) -> Path:
    """Path of the shipped cells, whether it exists or not."""
    return tuning.FOLDER / f"{arch}.attention.csv"


@functools.cache
def _by_width(file: Path) -> dict[tuple[int, int], dict[Cell, list[Row]]]:
    """Cells by the bytes of a number and head_dim, which cells that apply to each other share."""
    found: dict[tuple[int, int], dict[Cell, list[Row]]] = {}
    for row in read(file):
        found.setdefault((_BYTES[row.dtype], row.head_dim), {}).setdefault(row.cell, []).append(row)
    return found


def forget() -> None:
    """Read the files again at the next choice."""
    _by_width.cache_clear()
