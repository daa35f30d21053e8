"""One metric of several runs, over tokens or steps: read, as a table, as a picture. No torch here."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.errors import UserError
from llmtrain.pictures import new_figure, plain, save_figure
from llmtrain.tables import aligned
from llmtrain.train.report.curves import UNITS, Curve, bins, losses, read_curves, smooth


@dataclass(frozen=True)
class LoggedRun:
    """name: by which the folders differ. curves: by metric, and `tokens` at each step that has a metric."""

    name: str
    curves: dict[str, Curve]

    def points(self, metric: str, over: str) -> tuple[np.ndarray, np.ndarray]:
        """(tokens or steps, values)."""
        steps, values = self.curves[metric].copy()
        if over == "steps":
            return steps, values
        at, tokens = self.curves["tokens"].copy()
        return np.interp(steps, at, tokens), values


def read_runs(places: Sequence[Path], metric: str | None) -> list[LoggedRun]:
    """Runs with a name each. metric: None for the losses. Raises UserError for a place without metrics, or without this one."""
    files = [place / "metrics.jsonl" if place.is_dir() else place for place in places]
    folders = [str(file.resolve().parent) for file in files]
    shared = os.path.commonpath(folders) if len(set(folders)) > 1 else os.path.dirname(folders[0])
    runs = []
    for file, folder in zip(files, folders, strict=True):
        if not file.exists():
            raise UserError(f"{file} does not exist: name folders of runs (run_dir of their YAMLs)")
        curves = read_curves(file, lambda _: True)
        missing = metric not in curves if metric else not any(losses(curves))
        if missing or "tokens" not in curves:
            wanted = metric or "a loss"
            names = ", ".join(sorted(curves)) or "none"
            raise UserError(f"{file} has no {wanted} over tokens; it has: {names}")
        runs.append(LoggedRun(os.path.relpath(folder, shared), curves))
    return runs


def table(runs: Sequence[LoggedRun], metric: str | None) -> str:
    """A line for each run: steps, tokens, and the metrics' last and least values."""
    metrics = list(dict.fromkeys(name for run in runs for name in _metrics(run, metric)))
    head = ["run", "step", "tokens", *(f"{which} {_short(name)}" for name in metrics for which in ("last", "least"))]
    rows = [head]
    for run in runs:
        steps, tokens = run.curves["tokens"].copy()
        row = [run.name, f"{steps[-1]:,}", f"{tokens[-1]:,.0f}"]
        for name in metrics:
            values = _smoothed(run, name)[1] if name in run.curves else None
            row += ["-", "-"] if values is None else [f"{values[-1]:.4g}", f"{values.min():.4g}"]
        rows.append(row)
    return "\n".join(aligned(rows))


def draw_runs(runs: Sequence[LoggedRun], metric: str | None, over: str, out: Path) -> None:
    """Write the picture, which appears whole. over: tokens or steps."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    for number, run in enumerate(runs):
        for name in _metrics(run, metric):
            x, y = _smoothed(run, name, over)
            style = "o--" if name == losses(run.curves)[1] else "-"
            label = plain(f"{run.name}, {_short(name)}")
            axes.plot(x, y, style, color=f"C{number % 10}", linewidth=1.5, markersize=4, label=label)
    units = sorted({UNITS.get(name.rpartition("/")[2], name) for run in runs for name in _metrics(run, metric)})
    axes.set(xlabel=over, ylabel=plain(", ".join(units)))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    save_figure(figure, out)


def _metrics(run: LoggedRun, metric: str | None) -> list[str]:
    """The metric if a run has it, or the losses that it has."""
    return [name for name in ([metric] if metric else losses(run.curves)) if name in run.curves]


def _short(metric: str) -> str:
    training, validation = losses([metric])
    return "training loss" if training else "validation loss" if validation else metric


def _smoothed(run: LoggedRun, metric: str, over: str = "steps") -> tuple[np.ndarray, np.ndarray]:
    """Points of a curve, as many as a picture shows; the training loss smoothed."""
    x, y, *_ = bins(*run.points(metric, over))
    return (x, smooth(x, y)) if losses([metric])[0] else (x, y)
