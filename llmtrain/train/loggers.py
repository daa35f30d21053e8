"""Where metrics go: RUN/metrics.jsonl, the terminal, TensorBoard, wandb."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from llmtrain.config.schema import Config


class JSONLLogger(LoggerDestination):
    """One line per step (`{"step": …, metric: value, …}`), appended: a resumed run continues the file."""

    def __init__(self, path: Path, interval: int):
        self.path = path
        self.interval = interval
        self.pending: dict[str, float] = {}

    def init(self, state: State, logger: Logger) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.pending.update({key: float(value) for key, value in metrics.items()})

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.interval == 0:
            self._write(state)
        self.pending.clear()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._write(state)

    def _write(self, state: State) -> None:
        if self.pending and dist.get_global_rank() == 0:
            line = {"step": state.timestamp.batch.value, "tokens": state.timestamp.token.value, **self.pending}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.pending.clear()


def read_metrics(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric. A step that was run again after a resume counts with its last value."""
    values: dict[int, float] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if name in line:
            values[line["step"]] = line[name]
    return sorted(values), [values[step] for step in sorted(values)]


class ProgressLogger(LoggerDestination):
    """On a terminal, a bar with loss, tokens/s, MFU and time left; elsewhere, a plain line now and then."""

    def __init__(self, total_steps: int, bar: bool, seconds_between_lines: float = 10.0):
        self.total = total_steps
        self.between = seconds_between_lines
        self.metrics: dict[str, float] = {}
        self.last_line = 0.0
        self.began: tuple[float, int] | None = None
        self.progress = None
        if bar and sys.stdout.isatty():
            columns = (
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self.progress = Progress(*columns, console=Console(), speed_estimate_period=300)

    def fit_start(self, state: State, logger: Logger) -> None:
        self.began = (time.perf_counter(), state.timestamp.batch.value)
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
            print(f"step {step}/{self.total}  {self._text()}  {self._time_left(step)}", flush=True)

    def eval_end(self, state: State, logger: Logger) -> None:
        loss = self.metrics.get("metrics/validation/cross_entropy")
        if loss is not None:
            self._say(f"step {state.timestamp.batch.value}/{self.total}  validation loss {loss:.4f}")

    def fit_end(self, state: State, logger: Logger) -> None:
        self.close(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        if self.progress:
            self.progress.stop()
            self.progress = None

    def _say(self, text: str) -> None:
        self.progress.console.print(text) if self.progress else print(text, flush=True)

    def _text(self) -> str:
        parts = []
        if "loss/train/total" in self.metrics:
            parts.append(f"loss {self.metrics['loss/train/total']:.4f}")
        if "throughput/tokens_per_second" in self.metrics:
            parts.append(f"{self.metrics['throughput/tokens_per_second']:,.0f} tokens/s")
        if "throughput/mfu_foundry" in self.metrics:
            parts.append(f"MFU {100 * self.metrics['throughput/mfu_foundry']:.1f} %")
        return "  ".join(parts)

    def _time_left(self, step: int) -> str:
        assert self.began is not None
        began, first = self.began
        left = (time.perf_counter() - began) / max(step - first, 1) * (self.total - step)
        hours, minutes, seconds = int(left // 3600), int(left % 3600 // 60), int(left % 60)
        return f"{hours}:{minutes:02d}:{seconds:02d} left"


def build_loggers(config: Config, folder: Path, total_steps: int) -> list[LoggerDestination]:
    """Every destination of this run. Only rank 0 shows progress; each destination itself knows which ranks write."""
    loggers: list[LoggerDestination] = [JSONLLogger(folder / "metrics.jsonl", config.logging.interval)]
    if dist.get_global_rank() == 0:
        loggers.append(ProgressLogger(total_steps, config.logging.progress_bar))
    if config.logging.tensorboard:
        loggers.append(TensorboardLogger(log_dir=str(folder / "tensorboard"), flush_interval=100))
    if config.logging.wandb:
        loggers.append(_wandb(config, folder))
    return loggers


def _wandb(config: Config, folder: Path) -> WandBLogger:
    wandb = config.logging.wandb
    assert wandb is not None
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _netrc_has_wandb()):
        os.environ["WANDB_MODE"] = "offline"  # synced later with `wandb sync`
    os.environ.setdefault("WANDB_SILENT", "true")
    return WandBLogger(
        project=wandb.project,
        entity=wandb.entity,
        group=wandb.group,
        name=config.name,
        tags=list(wandb.tags),
        init_kwargs={"dir": str(folder), "id": config.name, "resume": "allow"},
    )


def _netrc_has_wandb() -> bool:
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return path.is_file() and "api.wandb.ai" in path.read_text(errors="replace")
