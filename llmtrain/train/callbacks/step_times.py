"""Metrics of what a step's time goes into, from a step now and then."""

import statistics

import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch.profiler import profile

from llmtrain.train.callbacks.step_recorder import StepRecorder, breakdown
from llmtrain.train.report.step_profile import DATA_WAIT, EXPOSED, GAPS

_FIRST = 5
"""Steps of a start before any is measured: they compile, and fill queues."""


class StepTimes(StepRecorder):
    """Records one step in `interval` on every rank, and logs shares of rank 0's time:

    step/gpu_busy           kernels compute
    step/communication      ranks exchange something, and nothing is computed beside
    step/data_wait          nothing runs, and the host waits for a batch
    step/gaps               nothing runs, for another reason

    and, of several ranks, step/slowest_rank, which computes longest, and step/lag_seconds, by which that is longer than the median.
    """

    def __init__(self, interval: int):
        super().__init__()
        self.interval, self._seen = interval, 0

    def wanted(self, state: State) -> bool:
        self._seen += 1
        due = (state.timestamp.batch.value + 1) % self.interval == 0 and self._seen > _FIRST
        return due and not torch.autograd._profiler_enabled()  # train.profile has the step

    def enough(self, state: State) -> bool:
        return True

    def finish(self, profiler: profile, state: State, logger: Logger) -> None:
        found = breakdown(profiler, 1)
        working = dist.all_gather_object(found.working)
        if len(working) > 1:
            slowest = max(range(len(working)), key=working.__getitem__)
            lag = working[slowest] - statistics.median_low(working)
            logger.log_metrics({"step/slowest_rank": slowest, "step/lag_seconds": lag})
        logger.log_metrics(
            {
                "step/gpu_busy": found.working / found.seconds,
                "step/communication": found.parts[EXPOSED] / found.seconds,
                "step/data_wait": found.parts[DATA_WAIT] / found.seconds,
                "step/gaps": found.parts[GAPS] / found.seconds,
            }
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.recording is not None:
            self.stop()
