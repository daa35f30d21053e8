"""Attention's work of the slowest of ranks that share packed sequences (train.parallel.context, data.mask_documents), computed.

    python -m benchmarks document_balance [FOLDER] [--tokens 32768 131072] [--context 2 4 8] [--draws 200]

FOLDER's Python files, 4 bytes a token, are the documents; without one, lengths drawn as those of web pages (log-normal, median
600). A token's work is the number of tokens of its document up to it. Printed is the slowest rank's work over the mean, averaged
over random packed sequences: head to tail, as ranks hold their two segments; the best pairs of these segments; eight segments a
rank, given out by their work; and what the documents leave of the whole sequence's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--context", type=positive, nargs="+", default=[2, 4, 8])
    parser.add_argument("--draws", type=positive, default=200)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse(argv)
    rng = np.random.default_rng(1)
    if args.folder is None:
        lengths = np.exp(rng.normal(np.log(600), 1.2, 200_000)).astype(int) + 1
    else:
        sizes = [file.stat().st_size for file in args.folder.rglob("*.py")]
        lengths = np.array([size // 4 for size in sizes if size > 64])
    print(f"{len(lengths):,} documents, median {int(np.median(lengths)):,} tokens, mean {int(lengths.mean()):,}")
    report = Report(args.out)
    for tokens in args.tokens:
        sequences = [token_work(rng, lengths, tokens) for _ in range(args.draws)]
        left = np.mean([work.sum() for work in sequences]) / (tokens * (tokens + 1) / 2)
        for ranks in args.context:
            ways = np.mean([imbalances(work, ranks) for work in sequences], axis=0)
            found = {f"{name}_x": float(way) for name, way in zip(("head_tail", "pairs", "eight"), ways, strict=True)}
            report.add(f"{tokens:,} tokens, context {ranks}", **found, left_percent=100 * float(left))
    return 0


def token_work(rng: np.random.Generator, lengths: np.ndarray, tokens: int) -> np.ndarray:
    """[tokens] of a packed sequence, which begins anywhere in its first document."""
    parts, at = [], 0
    begin = int(rng.integers(lengths[rng.integers(len(lengths))]))
    while at < tokens:
        length = max(int(lengths[rng.integers(len(lengths))]), begin + 1)
        parts.append(np.arange(begin + 1, length + 1))
        at, begin = at + length - begin, 0
    return np.concatenate(parts)[:tokens]


def imbalances(work: np.ndarray, ranks: int) -> tuple[float, float, float]:
    """The slowest rank's work over the mean, by the three ways."""
    segments, mean = work.reshape(2 * ranks, -1).sum(1), work.sum() / ranks
    ordered = np.sort(segments)
    given, held = np.zeros(ranks), np.zeros(ranks, int)
    for one in np.sort(work.reshape(8 * ranks, -1).sum(1))[::-1]:
        rank = np.where(held < 8, given, np.inf).argmin()
        given[rank] += one
        held[rank] += 1
    pairs = [(half[:ranks] + half[::-1][:ranks]).max() for half in (segments, ordered)]
    return pairs[0] / mean, pairs[1] / mean, given.max() / mean
