"""Rows of the grid's CSVs as the measured cells that `auto` chooses attention backends by.

    python -m benchmarks attention_choices benchmarks/results/kernels/{grid,drawn-fitted}.csv [--arch sm90]

Writes llmtrain/kernels/tables/ARCH.attention.csv anew. A row that failed is left out, and so is a backend whose error is more than
twice the least of its cell (a row without one is of a program that only timed).
"""

import csv
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.arguments import Parser
from llmtrain.errors import UserError
from llmtrain.kernels import tuning
from llmtrain.kernels.attention import measured

BEFORE = "triton before"
"""Our kernel at an earlier commit: it stands for ours at a head_dim and features that were not measured since."""


def rows(lines: Iterable[dict[str, str]]) -> list[measured.Row]:
    attention = [line for line in lines if line["operation"] == "attention" and not line["failed"]]
    found: list[measured.Row] = []
    key = lambda line: (line["cell"], line["seq_len"])  # noqa: E731
    for _, group in itertools.groupby(sorted(attention, key=key), key):
        cell = list(group)
        least = min((float(line["error"]) for line in cell if line["error"]), default=0.0)
        found += [row(line) for line in cell if not line["error"] or float(line["error"]) <= 2 * least]
    now = {(one.head_dim, one.features) for one in found if one.backend == measured.OURS}
    return [
        replace(one, backend=measured.OURS) if one.backend == BEFORE else one
        for one in found
        if not (one.backend == BEFORE and (one.head_dim, one.features) in now)
    ]


def row(line: dict[str, str]) -> measured.Row:
    """A row of the table from one of the grid; its label says what the cell is."""
    found = re.fullmatch(r"(\d+) on (\d+) x (\d+) (.*)", line["cell"])
    if found is None:
        raise UserError(f"'{line['cell']}' is no label of an attention cell, such as '32 on 8 x 128 plain'")
    heads, kv_heads, head_dim, features = found.groups()
    named: dict[str, str] = {}
    for word in features.split(", "):
        name, _, value = word.partition(" ")
        named[name] = value
    seq_len, window = int(line["seq_len"]), named.get("window")
    return measured.Row(
        dtype="bfloat16", n_heads=int(heads), n_kv_heads=int(kv_heads), head_dim=int(head_dim),
        alibi="ALiBi" in named, softcap="softcap" in named, documents="documents" in named,
        window=None if window is None else min(int(window), seq_len), seq_len=seq_len,
        backend=line["backend"], forward_ms=float(line["forward_ms"]), backward_ms=float(line["backward_ms"]),
        device=line["device"], date=line["date"], commit=line["commit"],
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("grid", type=Path, nargs="+")
    parser.add_argument("--arch", default="sm90")
    args = parser.parse(argv)
    found = list(rows(line for grid in args.grid for line in csv.DictReader(grid.open(newline=""))))
    file = tuning.FOLDER / f"{args.arch}.attention.csv"
    file.unlink(missing_ok=True)
    measured.save(file, found)
    print(f"{len(found)} rows, {len({one.cell for one in found})} cells: {file}")
    return 0
