"""The picture of the grid: the best public time over that of `auto` and of ours, cell by cell.

    python -m benchmarks grid_picture benchmarks/results/kernels/grid.csv docs/kernels-grid.png

`auto` is the backend that is chosen on Hopper today (of attention by kernels/attention/measured.py). Where that is the best
public kernel a cell counts as 1. Cells in which the backend was not measured have no point. Prints the figures of
BENCHMARKS.md.
"""

import csv
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser
from benchmarks.harness.pictures import picture
from benchmarks.programs.kernels import attention_choices
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.ssd.spec import SSDSpec

OURS, BEFORE = "triton", attention_choices.BEFORE
HOPPER = Platform("nvidia", "sm90", "", 1 << 37)
TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)
SERIES = (("ours", "#e0a458", "our kernel"), ("auto", "#20639b", "auto"))


@dataclass
class Times:
    """One cell. line: any of its rows; ms: forward and backward by backend, the device's own time; wall_ms: by the host's clock."""

    line: dict[str, str]
    ms: dict[str, float] = field(default_factory=dict)
    wall_ms: dict[str, float] = field(default_factory=dict)

    @property
    def operation(self) -> str:
        return self.line["operation"]

    @property
    def ours(self) -> float | None:
        return _ratio(self.ms, OURS)

    @property
    def auto(self) -> float | None:
        return _ratio(self.ms, auto_backend(self.line))

    @property
    def auto_by_wall(self) -> float | None:
        return _ratio(self.wall_ms, auto_backend(self.line))


def _ratio(times: dict[str, float], backend: str) -> float | None:
    """The best public time over that of `backend`; None where one of them was not measured."""
    public = min((ms for name, ms in times.items() if name not in (OURS, BEFORE)), default=None)
    return None if public is None or backend not in times else public / times[backend]


def auto_backend(line: dict[str, str]) -> str:
    """The backend that `auto` takes on Hopper today."""
    operation: Any = line["operation"]
    seq_len = None
    if operation == "attention":
        spec, seq_len = _attention(line)
    else:
        spec = SPECS[operation](line["cell"])
    return registry.resolve(operation, "auto", spec, HOPPER, seq_len).name


def _attention(line: dict[str, str]) -> tuple[AttentionSpec, int]:
    cell = attention_choices.row(line).cell
    spec = AttentionSpec(
        cell.n_heads, cell.n_kv_heads, cell.head_dim, 1.0, 8.0 if cell.alibi else None, cell.window,
        30.0 if cell.softcap else None, documents=cell.documents,
    )  # fmt: skip
    return spec, cell.seq_len


def _sizes(cell: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", cell)]


def _scan(heads: int, head_dim: int, d_state: int, groups: int) -> SSDSpec:
    return SSDSpec(heads, head_dim, d_state, groups, 256)


SPECS: dict[str, Callable[[str], Any]] = {
    "norm": lambda cell: NormSpec(_sizes(cell)[0], "layernorm" if "layer" in cell else "rmsnorm", "layer" in cell),
    "rotary": lambda cell: RotarySpec(_sizes(cell)[1]),
    "conv1d": lambda cell: Conv1dSpec(_sizes(cell)[0], 4),
    "gated_norm": lambda cell: GatedNormSpec(_sizes(cell)[0], 1, 1e-5),
    "ssd": lambda cell: _scan(*_sizes(cell)),
}
"""The block of a cell, by its name, of every operation but attention."""


def cells(lines: Iterable[dict[str, str]]) -> list[Times]:
    found: dict[tuple[str, ...], Times] = {}
    for line in lines:
        if not line["failed"]:
            key = (line["operation"], line["cell"], line["seq_len"])
            one = found.setdefault(key, Times(line))
            one.ms[line["backend"]] = float(line["forward_ms"]) + float(line["backward_ms"])
            if line["wall_ms"]:
                one.wall_ms[line["backend"]] = float(line["wall_ms"])
    return list(found.values())


def summary(found: list[Times]) -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| | cells | least | median | at 1.00 and more | at 1.05 and more |"
    yield "|---|---|---|---|---|---|"
    for operation in _operations(found):
        for name, label in (*((name, label) for name, _, label in SERIES), ("auto_by_wall", "auto by wall time")):
            if ratios := _ratios(found, operation, name):
                shares = " | ".join(f"{sum(r >= bar for r in ratios) / len(ratios):.0%}" for bar in (1.0, 1.05))
                row = f"| {operation}, {label} | {len(ratios)} | {ratios[0]:.2f} | {statistics.median(ratios):.2f}"
                yield f"{row} | {shares} |"


def _operations(found: list[Times]) -> list[str]:
    names = dict.fromkeys(one.operation for one in found)
    return [name for name in names if len(_ratios(found, name, "ours")) > 1]


def _ratios(found: list[Times], operation: str, name: str) -> list[float]:
    """Ratios of the cells in which it was measured."""
    of = (one for one in found if one.operation == operation)
    return sorted(ratio for one in of if (ratio := getattr(one, name)) is not None)


def plot(file: Path, found: list[Times]) -> None:
    operations = _operations(found)
    widths = [3.0 if name == "attention" else 1.2 for name in operations]
    size = (1.5 + 1.6 * sum(widths), 4.2)
    with picture(file, 1, len(operations), size=size, width_ratios=widths, sharey=True, squeeze=False) as axes:
        for axis, operation in zip(axes[0], operations, strict=True):
            for name, colour, label in SERIES:
                if ratios := _ratios(found, operation, name):
                    at = [(i + 0.5) / len(ratios) for i in range(len(ratios))]
                    axis.plot(at, ratios, "o", ms=3.5, color=colour, label=label)
            axis.axhline(1.0, color="black", lw=0.8)
            axis.set_title(f"{operation} ({len(_ratios(found, operation, 'ours'))} cells)", fontsize=9)
            axis.set_yscale("log")
            axis.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
            axis.set_xticks([])
            axis.minorticks_off()
        axes[0][0].set_ylabel("best public time / time, forward + backward\n(above 1: faster)", fontsize=8)
        axes[0][0].set_xlabel("cells, in the order of the ratio", fontsize=8)
        axes[0][0].legend(fontsize=8, frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("grid", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse(argv)
    with args.grid.open(newline="") as lines:
        found = cells(csv.DictReader(lines))
    print("\n".join(summary(found)))
    plot(args.picture, found)
    return 0
