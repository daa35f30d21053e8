"""Destinations of metrics: RUN/metrics.jsonl, the terminal, TensorBoard, wandb."""

import contextlib
import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from llmtrain.config.held_folder import make_folder, require_in_place
from llmtrain.config.output_folder import replace_file
from llmtrain.logs import run_log
from llmtrain.schema.training import LoggingConfig
from llmtrain.schema.wandb import WandbConfig, go_offline_without_key
from llmtrain.train.report.curves import TRAINING_LOSS, Curve, losses, read_curves, stream_metrics
from llmtrain.train.report.picture import LossPicture
from llmtrain.train.report.step_logger import StepLogger


class JSONLLogger(StepLogger):
    """One line per step (`{"step": …, metric: value, …}`), appended: a resumed run continues the file.

    Where a full disk or a kill cut the last line short, the next one begins on its own.
    """

    def __init__(self, path: Path, interval: int):
        super().__init__(interval)
        self.path, self.place = path, str(path)

    def open(self) -> None:
        make_folder(self.path.parent)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        line = json.dumps({"step": step, **metrics}).encode() + b"\n"
        if self.path.exists() and not self.path.stat().st_size:
            run_log.warning(
                f"WARNING: {self.path} was empty: what was logged before step {step:,} is gone, from the picture too"
            )
        with self.path.open("a+b") as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a line that was cut short does not spoil the next one
                    line = b"\n" + line
            file.write(line)


class TensorBoardLogger(StepLogger):
    """RUN/tensorboard. Not Composer's own, which scatters a run over nested folders.

    The writer's thread ends with its first failure: the next attempt makes another, and with it another file.
    """

    again_seconds = 60.0
    background = True  # its import takes seconds

    def __init__(self, folder: Path, interval: int):
        super().__init__(interval)
        self.folder, self.place = folder, str(folder)

    def open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        require_in_place(self.folder)
        self.writer = SummaryWriter(str(self.folder))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def end(self) -> None:
        self.writer.close()


class WandbLogger(StepLogger):
    """Weights & Biases; offline, into the run's folder, when there is no API key.

    RUN/wandb/run-id holds the id of its run there, in which a resumed run goes on. Not Composer's own, which calls a method that
    wandb 0.30 removed.
    """

    again_seconds = 3600.0
    background = True  # its import and its process take seconds

    def __init__(self, options: WandbConfig, folder: Path, interval: int, name: str, settings: dict[str, Any]):
        super().__init__(interval)
        self.options, self.folder, self.name, self.settings, self.place = options, folder, name, settings, "wandb"
        self.run: Any = None

    def open(self) -> None:
        if self.run is not None:
            return
        import wandb

        options = self.options
        go_offline_without_key()
        make_folder(self.folder / "wandb")
        stored = self.folder / "wandb" / "run-id"
        known = stored.read_text(errors="replace").strip() if stored.is_file() else ""
        self.run = wandb.init(
            id=known if re.fullmatch("[A-Za-z0-9_-]{1,64}", known) else None,
            resume="allow",
            project=options.project,
            entity=options.entity,
            group=options.group,
            name=self.name,
            tags=list(options.tags),
            dir=str(self.folder),
            config=self.settings,
            settings=wandb.Settings(silent=True),
        )
        replace_file(stored, self.run.id.encode())
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        def log() -> None:
            import wandb

            table: Any = wandb.Table
            self.run.log({"step": step, name: table(columns=columns, data=rows)})

        self.submit(lambda: None if self.lost else self._attempt(log))

    def end(self) -> None:
        self.run.finish()


def read_metrics(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric. A step that was run again after a resume counts with its last value."""
    curve = read_curves(path, lambda found: found == name).get(name, Curve())
    steps, values = curve.copy()
    return steps.tolist(), values.tolist()


class ProgressLogger(LoggerDestination):
    """Progress of a run: on a terminal, a bar with loss, tokens/s, MFU and time left; elsewhere, a plain line now and then."""

    def __init__(self, total_steps: int, bar: bool, seconds_between_lines: float = 10.0):
        self.total = total_steps
        self.between = seconds_between_lines
        self.metrics: dict[str, float] = {}
        self.last_line = 0.0
        self.progress = None
        if bar and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
            )
            self.progress = Progress(*columns, console=Console())

    def fit_start(self, state: State, logger: Logger) -> None:
        if self.progress:
            self.progress.start()
            self.task = self.progress.add_task("", total=self.total, completed=state.timestamp.batch.value, text="")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.metrics.update(metrics)

    def batch_end(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        if self.progress:
            self.progress.update(self.task, completed=step, text=self._text())
        elif step in (1, self.total) or time.perf_counter() - self.last_line >= self.between:
            self.last_line = time.perf_counter()
            run_log.info(f"step {step}/{self.total}  {self._text()}")

    def eval_end(self, state: State, logger: Logger) -> None:
        if (name := losses(self.metrics)[1]) is not None:
            text = f"step {state.timestamp.batch.value}/{self.total}  validation loss {self.metrics[name]:.4f}"
            streams = (
                f"{name} {value:.4f}" for name, key in stream_metrics(self.metrics) for value in [self.metrics[key]]
            )
            if listed := ", ".join(streams):
                text += f" ({listed})"
            self.progress.console.print(text, markup=False) if self.progress else run_log.info(text)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self.progress:
            with contextlib.suppress(OSError):  # of a terminal that has closed meanwhile, under nohup
                self.progress.stop()
            self.progress = None

    def _text(self) -> str:
        parts = []
        if TRAINING_LOSS in self.metrics:
            parts.append(f"loss {self.metrics[TRAINING_LOSS]:.4f}")
        for name, value in self.metrics.items():
            if name.startswith("loss/train/") and name not in (TRAINING_LOSS, "loss/train/total"):
                parts.append(f"{name.rpartition('/')[2]}-loss {value:.4f}")
        named = {"rewards/margins": "margin", "rollout/reward": "reward", "rollout/length": "tokens of an answer"}
        parts += [f"{text} {self.metrics[name]:.4g}" for name, text in named.items() if name in self.metrics]
        if "throughput/tokens_per_second" in self.metrics:
            parts.append(f"{self.metrics['throughput/tokens_per_second']:,.0f} tokens/s")
        if "throughput/mfu_foundry" in self.metrics:
            parts.append(f"MFU {100 * self.metrics['throughput/mfu_foundry']:.1f} %")
        shares = {name: self.metrics.get(f"throughput/{name}_share", 0.0) for name in ("evaluation", "save")}
        parts += [f"{name} {100 * part:.0f} % of the time" for name, part in shares.items() if part >= 0.005]
        if (left := self.metrics.get("throughput/seconds_left")) is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        return "  ".join(parts)


def build_loggers(
    logging: LoggingConfig, folder: Path, total_steps: int, name: str, settings: dict[str, Any]
) -> list[LoggerDestination]:
    """Return every destination of this run: on rank 0, which writes the metrics of all; none on others. name, settings: of the run,
    for Weights & Biases."""
    if dist.get_global_rank() != 0:
        return []
    loggers: list[LoggerDestination] = [
        JSONLLogger(folder / "metrics.jsonl", logging.interval),
        ProgressLogger(total_steps, logging.progress_bar),
        LossPicture(folder, logging.interval),
    ]
    if logging.tensorboard:
        loggers.append(TensorBoardLogger(folder / "tensorboard", logging.interval))
    if logging.wandb:
        loggers.append(WandbLogger(logging.wandb, folder, logging.interval, name, settings))
    return loggers
