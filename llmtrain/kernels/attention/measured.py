"""Measured times of attention backends, by which `auto` chooses: rows of one CSV per architecture, in tables/. No torch here.

A cell is one layer's attention at one length; its rows are its backends. Cells that were not measured have the times that a model
of each backend predicts from its rows (cost_model.py). The user's rows, in FILE.attention.csv beside his own tuning rows FILE.yaml,
stand in place of shipped ones of the same cell: `llmtrain bench tune FILE.yaml` writes there. Rows of one architecture do not apply
to another.
"""

import csv
import functools
import io
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from llmtrain.config.output_folder import replace_file
from llmtrain.errors import UserError
from llmtrain.kernels import tuning
from llmtrain.kernels.attention.cells import Cell, Row
from llmtrain.kernels.attention.cost_model import CostModel
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import DTYPES, Platform
from llmtrain.kernels.tuning_table import read_bounded
from llmtrain.tables import csv_text

DEFAULT_SEQ_LEN = 4096
"""Length that is assumed where a model is built for no certain one."""
OURS = "triton"
_ROWS = TypeAdapter(list[Row])


@dataclass(frozen=True)
class Choice:
    """A backend's forward and backward of a batch. nearest: its row of the most similar cell, predicted: that it is of another."""

    backend: str
    ms: float
    nearest: Row
    predicted: bool


def fastest(spec: AttentionSpec, able: Collection[str], platform: Platform, seq_len: int | None = None) -> list[Choice]:
    """Times of the backends in `able` whose rows apply to `spec`, rising; none unless a public one is among them. The same on every
    rank that has the same tables. Launches are not counted: called eagerly they cost the host as much in ours as in public ones.
    """
    by_parts = spec.lower_right and not replace(spec, softcap=None).only_causal  # which no cell is like
    if by_parts or spec.value_dim is not None or platform.vendor == "cpu":
        return []
    asked = Cell.of(spec, seq_len or DEFAULT_SEQ_LEN)
    models = _models(own_file(platform.arch), shipped_file(platform.arch), DTYPES[asked.dtype])
    applying = [model for name, model in sorted(models.items()) if name in able and model.applies(asked)]
    found = sorted((Choice(model.backend, *model.time(asked)) for model in applying), key=lambda one: one.ms)
    return found if any(one.backend != OURS for one in found) else []


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
    names = [field.name for field in fields(Row)]
    lines = ([getattr(row, name) for name in names] for row in ordered)
    plain = ([int(value) if isinstance(value, bool) else value for value in line] for line in lines)
    replace_file(file, csv_text([names, *plain]).encode())
    forget()


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
def _models(own: Path, shipped: Path, number_bytes: int) -> dict[str, CostModel]:
    """Models of backends for numbers as wide."""
    rows = {(row.cell, row.backend): row for file in (shipped, own) for row in read(file)}
    found: dict[str, list[Row]] = {}
    for row in rows.values():
        if DTYPES[row.dtype] == number_bytes:
            found.setdefault(row.backend, []).append(row)
    return {backend: CostModel(rows) for backend, rows in found.items()}


def forget() -> None:
    """Read the files again at the next choice."""
    _models.cache_clear()
