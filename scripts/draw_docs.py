"""The pictures of docs/pictures, which explain shapes: `python scripts/draw_docs.py [FOLDER]` draws all of them as SVG.

What they show is asked of the code where it can be: the layers of a pattern, the segments of context-parallel ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from llmtrain.models.pattern import parse_pattern
from llmtrain.models.segments import ContextParallelRanks

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
BLUE, ORANGE, GREEN, GRAY, RED = "#9ec5fe", "#ffd59e", "#a8dfb4", "#dee2e6", "#f5b5b5"
PATTERN = "m*5 (s+m m*5)*5 s+m m*2"


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", color: str = GRAY) -> None:
    """A rounded box from its lower left corner, with a text in its middle."""
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor="#495057", lw=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#495057", "lw": 1})
    if text:
        axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.12, text, ha="center", fontsize=7.5)


def note(axes: Axes, x: float, y: float, text: str, ha: str = "left") -> None:
    axes.text(x, y, text, fontsize=8.5, ha=ha, va="center")


def layers(axes: Axes) -> None:
    """The stack that a layer pattern says, with the shared block that several layers read."""
    stack = parse_pattern(PATTERN)
    box(axes, 5.2, 2.4, 8.6, 0.8, "s: one set of weights (attention + MLP), an adapter for each layer", ORANGE)
    for place, layer in enumerate(stack):
        x = 0.5 * place
        box(axes, x, 0.9, 0.42, 0.7, layer.block, BLUE)
        if layer.shared:
            arrow(axes, (5.2 + 8.6 * place / len(stack), 2.4), (x + 0.21, 1.6))
    note(
        axes, 0, 0.5, f"layers: {PATTERN}      {len(stack)} layers, from left to right; s+m: block s feeds this layer m"
    )
    axes.set_xlim(-0.1, 19.2)
    axes.set_ylim(0.2, 3.4)


def packing(axes: Axes) -> None:
    """Documents in samples, the labels, and which tokens see each other."""
    note(
        axes,
        0,
        5.2,
        "documents A, B, C one after the other, each closed by an end-of-document token (e); cut into samples",
    )
    row = ["A", "A", "A", "A", "e", "B", "B", "B", "e", "C", "C", "C", "C", "C", "C", "e"]
    color = {"A": BLUE, "B": ORANGE, "C": GREEN}
    owner = ""
    for place, token in enumerate(row):
        owner = token if token != "e" else owner
        box(axes, 0.6 * place + (0.3 if place >= 8 else 0), 4.3, 0.54, 0.54, token, color[owner])
    for title, x0, masked in (("default: all that came before", 0.6, False), ("data.mask_documents: true", 6.4, True)):
        note(axes, x0, 3.75, title)
        for i in range(8):
            for j in range(8):
                a, b = ("A" if k < 5 else "B" for k in (i, j))
                seen = j <= i and (a == b or not masked)
                box(axes, x0 + 0.36 * j, 3.2 - 0.36 * i, 0.33, 0.33, "", color[b] if seen else "#ffffff")
    note(axes, 3.7, 2.2, "row: a token of sample 1\ncolumn: a token that it sees")
    note(
        axes,
        9.5,
        2.2,
        "state, convolution and\nlearned positions begin\nanew at B; e does not\npredict B's first token",
    )
    axes.set_xlim(-0.1, 12.4)
    axes.set_ylim(0.4, 5.5)


def sharding(axes: Axes) -> None:
    """Memory of two ranks under the strategies of FSDP2."""
    rows = (
        ("full", "gathered for each layer, freed again", (0.5, 0.5, 0.5)),
        ("grad_op", "gathered once a step, kept", (1.0, 0.5, 0.5)),
        ("hybrid", "sharded inside a node, a replica on each node", (0.5, 0.5, 0.5)),
    )
    for at, (name, text, shares) in enumerate(rows):
        y = 3.6 - 1.5 * at
        note(axes, 0, y + 0.8, f"{name}: weights {text}")
        groups = 2 if name == "hybrid" else 1
        for rank in range(2 * groups):
            x = 6.2 * (rank % 2) + 12.8 * (rank // 2)
            note(axes, x, y + 0.2, f"rank {rank}")
            place = x + 1.2
            parts = zip(
                ("weights", "gradients", "Adam m, v"), shares, (BLUE, ORANGE, GREEN), (1.4, 1.4, 1.6), strict=True
            )
            for part, share, color, width in parts:
                box(axes, place, y - 0.05, width, 0.5, "", "#ffffff")
                start = place if share == 1 or rank % 2 == 0 else place + width / 2
                box(axes, start, y - 0.05, width * share, 0.5, "", color)
                axes.text(place + width / 2, y + 0.2, part, ha="center", va="center", fontsize=7.5)
                place += width + 0.1
    arrow(axes, (12.0, 0.85), (12.7, 0.85), "")
    arrow(axes, (12.7, 0.7), (12.0, 0.7), "")
    note(axes, 11.0, 0.2, "gradients, once a step, over the network")
    axes.set_xlim(-0.1, 25.4)
    axes.set_ylim(-0.1, 5.0)


def context_parallel(axes: Axes) -> None:
    """Segments of a sequence on two context-parallel ranks, and what travels between them."""
    size, colors = 2, (BLUE, ORANGE)
    ranks = [ContextParallelRanks(rank, size) for rank in range(size)]
    note(axes, 0, 4.6, f"one sequence, {ranks[0].count} segments")
    for rank in ranks:
        for place in rank.own:
            box(axes, 2.5 * place, 3.7, 2.4, 0.6, f"segment {place}: rank {rank.rank}", colors[rank.rank])
    for rank in ranks:
        y = 2.4 - 1.2 * rank.rank
        note(axes, 0, y + 0.25, f"rank {rank.rank}")
        for at, place in enumerate(rank.own):
            box(axes, 1.2 + 1.7 * at, y, 1.6, 0.5, f"segment {place}", colors[rank.rank])
            # Work of causal attention grows with the keys that a query sees.
            box(axes, 5.2 + sum(1 + p for p in rank.own[:at]) * 0.62, y, (place + 1) * 0.62, 0.5, f"{place + 1}", GRAY)
    note(axes, 5.2, 3.2, "keys that its queries see (causal attention): as much work on each rank")
    note(
        axes,
        0,
        0.55,
        "attention: keys and values of all segments are gathered        Mamba-2, Gated DeltaNet: states are passed on,",
    )
    note(
        axes,
        0,
        0.2,
        "convolution: the last d_conv − 1 inputs of the segment before        each rank from a state of zero, corrected afterwards",
    )
    axes.set_xlim(-0.1, 10.2)
    axes.set_ylim(0, 4.8)


def checkpoint(axes: Axes) -> None:
    """A save from the step to the store, and back."""
    steps = (
        ("step N", "weights, optimizer", BLUE),
        ("host memory", "the step waits\nfor this copy alone", BLUE),
        ("step-N.partial", "tensors-*.safetensors,\nindex.json: hashed\nwhile written", ORANGE),
        ("step-N", "manifest.json last,\none rename", GREEN),
        ("remote", "files, then manifest", GREEN),
    )
    for at, (title, text, color) in enumerate(steps):
        box(axes, 3.0 * at, 2.0, 2.2, 0.7, title, color)
        axes.text(3.0 * at + 1.1, 1.85, text, ha="center", va="top", fontsize=7.5)
        if at:
            arrow(axes, (3.0 * at - 0.8, 2.35), (3.0 * at, 2.35))
    box(axes, 6.0, 3.5, 2.2, 0.6, "killed here", RED)
    arrow(axes, (7.1, 3.5), (7.1, 2.7))
    note(axes, 8.4, 3.8, "leaves step-N.partial, which no start reads")
    box(axes, 6.0, 0.0, 2.2, 0.6, "a start", GRAY)
    arrow(axes, (9.6, 1.2), (8.2, 0.4))
    arrow(axes, (12.6, 1.35), (8.2, 0.25))
    note(
        axes,
        0,
        0.3,
        "any number of ranks, NVIDIA, AMD or CPU:\nevery byte compared; a damaged one is\nnamed, the one before it taken",
    )
    axes.set_xlim(-0.2, 14.6)
    axes.set_ylim(-0.2, 4.3)


PICTURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "layers": (layers, (9.0, 1.9)),
    "packing": (packing, (9.0, 4.0)),
    "sharding": (sharding, (9.5, 3.2)),
    "context-parallel": (context_parallel, (8.5, 3.8)),
    "checkpoint": (checkpoint, (9.0, 3.2)),
}
"""Name -> what draws it, and its size in inches."""


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "llmtrain", "font.family": "DejaVu Sans"})
    for name, (draw, size) in PICTURES.items():
        figure = Figure(figsize=size, layout="tight")
        axes = figure.subplots()
        axes.axis("off")
        draw(axes)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
