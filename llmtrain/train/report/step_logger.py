"""The base of what takes a run's metrics step by step."""

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmtrain.logs import run_log

RARE = ("icl/", "start/", "step/", "train/skipped_steps", "train/spikes", "train/rewinds")
"""Beginnings of the metrics that only a few steps have. Such a step is written whatever the interval."""


class StepLogger(LoggerDestination):
    """Gathers what Composer logs in pieces during a step, and writes it once, under the step's number.

    What cannot be written (a full disk, say) is left out: a warning says so once, and a notice when it works again. Training
    goes on. place: what is written to, for these messages. again_seconds: pause after a failure. background: a thread opens and
    writes, from the end of the first step, which does not wait for it.
    """

    place: str
    again_seconds = 0.0
    background = False

    def __init__(self, interval: int = 1):
        self.interval = interval
        self.pending: dict[str, float] = {}
        self.opened = False
        self.lost = 0
        self.not_before = 0.0
        self._thread: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Make ready to write; called at the start, and before the first `write` after a failure."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Close what `open` opened; it may have failed."""

    def init(self, state: State, logger: Logger) -> None:
        self.opened = True
        if not self.background:
            self._attempt(self.open)

    def close(self, state: State, logger: Logger) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self.opened and not self.lost and (self._thread is not None or not self.background):
            self._attempt(self.end)
        self.opened = False

    def submit(self, action: Callable[[], object]) -> None:
        """Run an action, in the background after those before it where that is wanted."""
        if not self.background:
            action()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "metrics")
            self._thread.submit(self._attempt, self.open)
        self._thread.submit(action)

    def _attempt(self, action: Callable[[], object]) -> None:
        """Run an action; whatever it raises is a warning, the first time in a row."""
        try:
            action()
        except Exception as error:
            self.lost += 1
            self.not_before = time.monotonic() + self.again_seconds
            if self.lost == 1:
                run_log.warning(
                    f"WARNING: {self.place} cannot be written: {type(error).__name__}: {error}. Training goes on, and its "
                    "metrics are left out there until it can be"
                )

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self.lost and time.monotonic() < self.not_before:
            self.lost += 1
            return
        before = self.lost

        def write() -> None:
            if before:
                self.open()
            self.write(step, metrics)

        self._attempt(write)
        if before and self.lost == before:
            self.lost = 0
            run_log.info(f"{self.place} is written again, from step {step}; {before} writes before it are lost")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.pending.update({key: float(value) for key, value in metrics.items()})

    def batch_end(self, state: State, logger: Logger) -> None:
        if any(name.startswith(RARE) for name in self.pending) or state.timestamp.batch.value % self.interval == 0:
            self._flush(state)
        self.pending.clear()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._flush(state)

    def _flush(self, state: State) -> None:
        # JSON has no NaN; a metric that is not finite is left out rather than make the line unreadable.
        finite = {name: value for name, value in self.pending.items() if math.isfinite(value)}
        if finite:
            step, metrics = state.timestamp.batch.value, {"tokens": state.timestamp.token.value, **finite}
            self.submit(lambda: self._write(step, metrics))
        self.pending.clear()
