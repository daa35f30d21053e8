"""Choices of `auto` at drawn shapes of attention, against the fastest backend of all that were measured there, ours too.

    python -m benchmarks drawn_choices benchmarks/results/kernels/drawn.csv

Prints one row of figures: how many shapes are below the bars, the least share, and medians of ours against the best public backend
(with features; plain up to a head_dim of 128); then a row of each shape below a bar, with the backend that was taken.
"""

import csv
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser
from benchmarks.programs.kernels.grid_picture import OURS, Times, auto_backend, cells

DEVICE, WALL = 0.98, 0.95
"""Least shares of the fastest backend's speed that are asked of `auto`."""


def shares(one: Times) -> dict[str, Any] | None:
    """Shares of one shape; None where what `auto` takes was not measured."""
    taken = auto_backend(one.line)
    if taken not in one.ms or taken not in one.wall_ms:
        return None
    shape = {
        "what": f"{one.line['cell']}, T {one.line['seq_len']}",
        "taken": taken,
        "fastest": min(one.ms, key=lambda name: one.ms[name]),
    }
    device, wall = (round(min(times.values()) / times[taken], 3) for times in (one.ms, one.wall_ms))
    return {**shape, "device_x": device, "wall_x": wall}


def medians(found: list[Times]) -> dict[str, float]:
    """Medians of ours against the best public backend."""
    kinds: dict[str, list[float]] = {"features_x": [], "plain_x": []}
    for one in found:
        plain = one.line["cell"].endswith(" plain")
        narrow = int(one.line["cell"].split()[4]) <= 128
        if OURS in one.ms and one.ours is not None and (not plain or narrow):
            kinds["plain_x" if plain else "features_x"].append(one.ours)
    return {name: round(statistics.median(ratios), 3) for name, ratios in kinds.items() if ratios}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("drawn", type=Path)
    args = parser.parse(argv)
    with args.drawn.open(newline="") as lines:
        found = cells(csv.DictReader(lines))
    each = [one for times in found if (one := shares(times)) is not None]
    below = [one for one in each if one["device_x"] < DEVICE or one["wall_x"] < WALL]
    counts: dict[str, Any] = {"shapes_count": len(each)}
    for name, bar in (("device", DEVICE), ("wall", WALL)):
        ratios = [one[f"{name}_x"] for one in each]
        counts |= {f"{name}_least_x": min(ratios), f"{name}_below_count": sum(ratio < bar for ratio in ratios)}
    for row in ({**counts, **medians(found)}, *below):
        print(json.dumps(row))
    return 0
