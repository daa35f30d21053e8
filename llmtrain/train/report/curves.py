"""Metrics over steps, as RUN/metrics.jsonl holds them, and a smoothed curve through them. No torch here."""

import io
import re
from array import array
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import numpy as np

from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.logs import run_log

TRAINING_LOSS = "loss/train/cross_entropy"
"""Without the z-loss, which is loss/train/z; loss/train/total is their sum, and all that other objectives log."""
VALIDATION_LOSS = "metrics/validation/cross_entropy"
"""Over all validation streams. Where there are several, that of STREAM is metrics/validation/STREAM/cross_entropy."""
UNITS = {"cross_entropy": "cross entropy, nats per token", "total": "loss", "preference_loss": "loss"}
"""Units of losses by the last part of their names."""
OF_ANSWERS = (
    "rewards/margins",
    "rewards/accuracies",
    "rollout/reward",
    "samples/exact_match",
    "rollout/length",
    "policy/kl",
)
"""Metrics that a picture has below the loss."""

_BINS = 2000
"""Points of a curve that are drawn at most: a picture is half as many pixels wide."""


class Curve:
    """Values of a metric over rising steps. A step that a resumed run takes again replaces it, and all that came after."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._values.pop()
        self._steps.append(step)
        self._values.append(value)

    def copy(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64 [n], values float64 [n])."""
        return np.array(self._steps, dtype=np.int64), np.array(self._values, dtype=np.float64)


def read_curves(path: Path, wanted: Callable[[str], bool]) -> dict[str, Curve]:
    """Curves of the metrics that are wanted. Lines that are no metrics (cut short, say) are left out, and counted in a warning."""
    curves: dict[str, Curve] = {}
    torn = 0
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as lines:
        for text in lines:
            try:
                line = parse_json(text)
                step = int(line["step"])
                found = {name: float(line[name]) for name in filter(wanted, line)}
            except (ValueError, KeyError, TypeError, OverflowError):
                torn += bool(text.strip())
                continue
            for name, value in found.items():
                curves.setdefault(name, Curve()).add(step, value)
    if torn:
        run_log.warning(f"WARNING: {path}: lines left out, cut short by a full disk or a kill: {torn}")
    return curves


def losses(names: Collection[str]) -> tuple[str | None, str | None]:
    """Loss of training, and that over all validation streams, among the metrics of a run."""
    training, validation = (TRAINING_LOSS, "loss/train/total"), (VALIDATION_LOSS, "metrics/validation/preference_loss")
    first, second = ([name for name in some if name in names] for some in (training, validation))
    return first[0] if first else None, second[0] if second else None


def is_drawn(name: str) -> bool:
    """True for a metric that the picture of a run may show."""
    return name in OF_ANSWERS or losses([name]) != (None, None) or bool(stream_metrics([name]))


def stream_metrics(names: Iterable[str]) -> list[tuple[str, str]]:
    """(validation stream, its metric) for each metric that is the loss of a single stream."""
    matches = (re.fullmatch(r"metrics/validation/(.+)/(cross_entropy|preference_loss)", name) for name in names)
    return [(found[1], found[0]) for found in matches if found]


def smooth(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A curve through the middle of `values`, at the same steps, which do not repeat.

    At each point a line is fitted to its neighbours on both sides, the nearer the heavier (LOESS: Cleveland, JASA 1979, of
    degree 1), so that the curve neither lags behind a falling loss nor leaves it at the ends, as moving averages do. The
    number of neighbours grows from the start, where a loss falls fastest.
    """
    n = len(values)
    result = np.empty(n)
    for i in range(n):
        reach = 1 + int(min(0.2 * i, max(4, 0.03 * n)))
        near = slice(max(i - reach, 0), i + reach + 1)
        x = (steps[near] - steps[i]).astype(np.float64)
        y = values[near]
        weight = (1 - np.abs(x / (np.abs(x).max() * (1 + 1 / reach) + 1e-9)) ** 3) ** 3
        mean_x, mean_y = np.average(x, weights=weight), np.average(y, weights=weight)
        spread = np.sum(weight * (x - mean_x) ** 2)
        slope = np.sum(weight * (x - mean_x) * (y - mean_y)) / spread if spread > 0 else 0.0
        result[i] = mean_y - slope * mean_x
    return result


def bins(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Step, mean, lowest and highest value of at most _BINS groups of neighbours."""
    borders = np.unique(np.linspace(0, len(values), min(len(values), _BINS) + 1).astype(np.int64))[:-1]
    sizes = np.diff([*borders, len(values)])
    means = [np.add.reduceat(numbers.astype(np.float64), borders) / sizes for numbers in (steps, values)]
    return means[0], means[1], np.minimum.reduceat(values, borders), np.maximum.reduceat(values, borders)
