"""Figures of a program as rows: printed, and written to the file from which `benchmarks.tables` makes its tables."""

import json
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError

Row = dict[str, Any]


def rounded(value: Any) -> Any:
    """Round all numbers in a structure of figures to six significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def metric_rows(file: Path, *names: str) -> list[Row]:
    """Complete lines of a run's metrics.jsonl that have all of these metrics."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []  # the last may be cut short
    return [row for row in map(json.loads, lines) if all(name in row for name in names)]


def device_name() -> str:
    """Name and number of the GPUs, or CPU."""
    import torch

    if not torch.cuda.is_available():
        return "CPU"
    count = torch.cuda.device_count()
    return torch.cuda.get_device_name(0) if count == 1 else f"{count} {torch.cuda.get_device_name(0)}"


class Report:
    """Rows of one program. out: file that is rewritten after each row. keep: rows that are there already are kept, so that an
    interrupted sweep goes on; otherwise the file begins anew. quiet: print nothing. Raises UserError where the file is no such
    report."""

    def __init__(self, out: Path | None = None, *, keep: bool = False, quiet: bool = False):
        self.out, self.quiet, self.rows = out, quiet, list[Row]()
        if keep and out is not None and out.is_file():
            try:
                self.rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{out}: no rows of a program ({error}); name another file, or remove it") from None

    def found(self, what: str) -> Row | None:
        """The row that is there already, unless it failed."""
        return next((row for row in self.rows if row["what"] == what and "failed" not in row), None)

    def add(self, what: str, **figures: Any) -> Row:
        """Write a row; figures' names end in their unit, and None is left out."""
        row = {"what": what, **{name: rounded(value) for name, value in figures.items() if value is not None}}
        self.rows = [one for one in self.rows if one["what"] != what] + [row]
        if not self.quiet:
            print("; ".join([what, *(f"{name} {value}" for name, value in row.items() if name != "what")]), flush=True)
        self.write()
        return row

    def write(self) -> None:
        if self.out is None:
            return
        from llmtrain.bench.tune.search import commit

        command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
        facts = {"command": command, "device": device_name(), "commit": commit() or None}
        facts["date"] = date.today().isoformat()
        rows = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in self.rows)
        head = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in facts.items())
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(f'{{\n{head}  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")
