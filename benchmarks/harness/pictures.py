"""Pictures of the programs: figures without a display, written to a file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def picture(path: Path, *grid: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """Axes (an array of them by rows and columns) of a picture that is written to `path` at the end. size: inches. options: of
    matplotlib's `Figure.subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*grid, **options)
    yield axes
    for one in figure.axes:
        one.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
