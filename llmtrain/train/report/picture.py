"""RUN/loss.png: training and validation loss over steps, redrawn while a run trains."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from composer.core import State
from composer.loggers import Logger

from llmtrain.logs import run_log
from llmtrain.pictures import new_figure, plain, save_figure
from llmtrain.train.report.curves import (
    OF_ANSWERS,
    UNITS,
    Curve,
    bins,
    is_drawn,
    losses,
    read_curves,
    smooth,
    stream_metrics,
)
from llmtrain.train.report.step_logger import StepLogger

Points = tuple[np.ndarray, np.ndarray]
"""Steps and values."""


def plot_loss(folder: Path) -> Path | None:
    """Draw RUN/loss.png from RUN/metrics.jsonl: loss of training and validation. None if nothing was logged."""
    log = folder / "metrics.jsonl"
    if not log.exists():
        return None
    return draw({name: curve.copy() for name, curve in read_curves(log, is_drawn).items()}, folder)


def draw(curves: Mapping[str, Points], folder: Path) -> Path | None:
    """Draw RUN/loss.png, which appears whole. curves: by name of the metric. None if there are none."""
    if not curves:
        return None
    training, overall = losses(curves)
    of_answers = [name for name in OF_ANSWERS if name in curves]
    figure = new_figure(8, 4.5 + 1.5 * len(of_answers))
    axes, *below = figure.subplots(
        1 + len(of_answers), sharex=True, squeeze=False, height_ratios=[3, *([1] * len(of_answers))]
    )[:, 0]
    if training:
        steps, values = curves[training]
        x, middle, low, high = bins(steps, values)
        if len(x) == len(steps):
            axes.plot(x, middle, color="#9ecae1", linewidth=1, label="training, each step")
        else:
            axes.fill_between(x, low, high, color="#9ecae1", linewidth=0, label="training, lowest to highest step")
        axes.plot(x, smooth(x, middle), color="#2171b5", linewidth=1.8, label="training, smoothed")
    streams = stream_metrics(curves)
    for number, (name, metric) in enumerate(streams):
        colour = f"C{2 + number % 8}"  # neither the blue of training nor the orange of all streams
        label = plain(f"validation, {name}")
        axes.plot(*curves[metric], "o-", color=colour, linewidth=1, markersize=3, alpha=0.8, label=label)
    if overall:
        at, validation = curves[overall]
        label = "validation, all streams" if streams else "validation"
        axes.plot(at, validation, "o-", color="#d94801", markersize=5, label=label)
        axes.annotate(
            f"{validation[-1]:.3f}", (at[-1], validation[-1]), textcoords="offset points", xytext=(-6, 8), ha="right"
        )
    title = plain(folder.resolve().name)
    unit = UNITS[(training or overall or streams[0][1]).rpartition("/")[2]]
    axes.set(ylabel=unit, title=title, xlim=(0, None))
    axes.grid(alpha=0.3)
    for panel, name in zip(below, of_answers, strict=True):
        x, middle, *_ = bins(*curves[name])
        panel.plot(x, middle, color="#9ecae1", linewidth=1, label=name)
        panel.plot(x, smooth(x, middle), color="#2171b5", linewidth=1.8, label=f"{name}, smoothed")
        panel.set(ylabel=name.rpartition("/")[2])
        panel.grid(alpha=0.3)
    figure.axes[-1].set(xlabel="step")
    axes.legend(frameon=False, fontsize="small" if len(streams) > 5 else None, ncols=1 + len(streams) // 10)
    return save_figure(figure, folder / "loss.png")


class LossPicture(StepLogger):
    """Redraws RUN/loss.png in a thread of rank 0 while training goes on.

    first: seconds after the start until the first picture. between: least seconds from one to the next; as a picture takes
    interpreter time of training, also 200 times what the last one took. A picture that fails is reported once.
    """

    def __init__(self, folder: Path, interval: int, first: float = 10.0, between: float = 60.0):
        super().__init__(interval)
        self.folder, self.place, self.between = folder, str(folder / "loss.png"), between
        self.curves: dict[str, Curve] = {}
        self.due = time.monotonic() + first
        self.thread: threading.Thread | None = None
        self.failed = False

    def open(self) -> None:
        log = self.folder / "metrics.jsonl"
        if log.exists():
            self.curves = read_curves(log, is_drawn)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name in filter(is_drawn, metrics):
            self.curves.setdefault(name, Curve()).add(step, metrics[name])
        if time.monotonic() >= self.due and not (self.thread and self.thread.is_alive()):
            self.thread = threading.Thread(target=self._draw, args=(self._copy(),), daemon=True)
            self.thread.start()

    def close(self, state: State, logger: Logger) -> None:
        """Draw the last steps too, of a run that was drawn before: it may end in an error."""
        if self.thread:
            self.thread.join()
            self.thread = None
            self._draw(self._copy())

    def _copy(self) -> dict[str, Points]:
        return {name: curve.copy() for name, curve in self.curves.items()}

    def _draw(self, curves: Mapping[str, Points]) -> None:
        began = time.monotonic()
        try:
            draw(curves, self.folder)
        except Exception as error:  # a picture must not end a run
            if not self.failed:
                run_log.info(f"WARNING: {self.folder / 'loss.png'} was not drawn: {type(error).__name__}: {error}")
            self.failed = True
        took = time.monotonic() - began
        self.due = began + took + max(self.between, 200 * took)
