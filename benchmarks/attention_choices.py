"""Rows of the grid's CSV as the measured cells that `auto` chooses attention backends by.

    python -m benchmarks.attention_choices benchmarks/grid.csv [--arch sm90]

Writes llmtrain/kernels/tables/ARCH.attention.csv anew. A row that failed is left out, and so is a backend whose error is more than
twice the least of its cell.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmtrain.errors import UserError, exit_with
from llmtrain.kernels import tuning
from llmtrain.kernels.attention import measured


def rows(lines: Iterable[dict[str, str]]) -> Iterator[measured.Row]:
    attention = [line for line in lines if line["operation"] == "attention" and not line["failed"]]
    attention = [line for line in attention if " before" not in line["backend"]]
    key = ("cell", "seq_len")
    for _, group in itertools.groupby(
        sorted(attention, key=lambda one: [one[k] for k in key]), lambda one: [one[k] for k in key]
    ):
        cell = list(group)
        least = min(float(line["error"]) for line in cell)
        yield from (row(line) for line in cell if float(line["error"]) <= 2 * least)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--arch", default="sm90")
    args = parser.parse_args()
    with args.grid.open(newline="") as lines:
        found = list(rows(csv.DictReader(lines)))
    file = tuning.FOLDER / f"{args.arch}.attention.csv"
    file.unlink(missing_ok=True)
    measured.save(file, found)
    print(f"{len(found)} rows, {len({one.cell for one in found})} cells: {file}")
    return 0


if __name__ == "__main__":
    exit_with(main)
