"""Pictures of data: lengths of documents, frequencies of tokens, shares of a mixture over steps. Each file appears whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.inspect.statistics import SourceStatistics
from llmtrain.pictures import new_figure, plain, save_figure

_BINS = 400
"""Points of a curve over steps at most: the picture is twice as many pixels wide."""


def draw_lengths(sources: Sequence[SourceStatistics], path: Path) -> None:
    """Documents by their number of tokens, of each source."""
    with _picture(path, "tokens of a document", "share of the documents") as axes:
        axes.set_xscale("log", base=2)
        for one in sources:
            if one.lengths.count:
                edges, counts = one.lengths.bars()
                axes.stairs(counts / counts.sum(), edges, label=plain(one.name), linewidth=1.5)


def draw_frequencies(sources: Sequence[SourceStatistics], path: Path) -> None:
    """Share of each token, from the most frequent on, of each source."""
    with _picture(path, "rank of the token", "share of the tokens") as axes:
        axes.set(xscale="log", yscale="log")
        for one in sources:
            counts = np.sort(one.counts[one.counts > 0])[::-1]
            ranks = np.unique(np.geomspace(1, max(len(counts), 1), _BINS).astype(np.int64))
            if len(counts):
                axes.plot(ranks, counts[ranks - 1] / counts.sum(), label=plain(one.name), linewidth=1.5)


def draw_shares(names: Sequence[str], first: int, counts: NDArray[np.int64], path: Path) -> None:
    """Share of each stream over steps. counts: [steps, streams], from step `first` on."""
    borders = np.unique(np.linspace(0, len(counts), min(len(counts), _BINS) + 1).astype(np.int64))
    groups = np.add.reduceat(counts, borders[:-1], axis=0)
    shares = groups / groups.sum(axis=1, keepdims=True)
    with _picture(path, "step", "share of the samples") as axes:
        axes.set_ylim(0, 1)
        for number, name in enumerate(names):
            axes.stairs(shares[:, number], first - 0.5 + borders, label=plain(name), linewidth=1.5)


@contextmanager
def _picture(path: Path, x: str, y: str) -> Iterator[Any]:
    """Axes of a picture that is written at the end, with a legend. x, y: labels."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    yield axes
    axes.legend(frameon=False)
    save_figure(figure, path, make_folder=True)
