"""Steps recorded by PyTorch's profiler, with what `breakdown` needs to know about them, and metrics of a step's time."""

import contextlib
import re
import statistics
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.profiler import ProfilerActivity, profile, record_function

from llmtrain.train.report.step_profile import DATA_WAIT, EXPOSED, GAPS, Span, StepProfile, innermost, step_profile

_STEP, _DATA = "llmtrain.step", "llmtrain.data"
_OPTIMIZER = "Optimizer.step#"
"""The beginning of PyTorch's names of optimizers' steps."""
_CALL = re.compile(r"(cuda|cu|hip)[A-Z]|INVALID")
"""Names of calls of CUDA's and HIP's runtimes and drivers, some of which the profiler does not know. A kernel has the number of the
call that launched it; operators have numbers of their own, which may be the same ones."""


class StepRecorder(Callback, ABC):
    """The base of what records steps: asks `wanted` before a step and `enough` after each that it recorded, then calls `finish`."""

    def __init__(self) -> None:
        self.recording: profile | None = None
        self.gpu = torch.cuda.is_available()
        self._ranges, self._data = contextlib.ExitStack(), contextlib.ExitStack()

    @abstractmethod
    def wanted(self, state: State) -> bool:
        """True: record from the next step on."""

    @abstractmethod
    def enough(self, state: State) -> bool:
        """True: the step that has ended is the last one to record."""

    @abstractmethod
    def finish(self, profiler: profile, state: State, logger: Logger) -> None:
        """Use a profile, which was stopped."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self.recording is None and self.wanted(state):
            self.begin()
        if self.recording is not None:
            self._ranges.enter_context(record_function(_STEP))
            self._data.enter_context(record_function(_DATA))

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._data.close()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.recording is None:
            return
        last = self.enough(state)
        if last and self.gpu:
            torch.cuda.synchronize()
        self._ranges.close()
        if last:
            self.finish(self.stop(), state, logger)

    def begin(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpu else [])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cycles, which a profile from start to stop has not
            self.recording = profile(activities=activities)
            self.recording.start()

    def stop(self) -> profile:
        profiler, self.recording = self.recording, None
        assert profiler is not None
        profiler.stop()
        return profiler


def breakdown(profiler: profile, steps: int) -> StepProfile:
    """The parts of a stopped profile. Without a GPU, operators of the thread that trains stand for kernels."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    on_host = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    on_gpu = [e for e in events if e.device_type() != torch.autograd.DeviceType.CPU]
    named = {name: _spans(e for e in on_host if e.name() == name) for name in (_STEP, _DATA)}
    window = Span(_STEP, min(s.start for s in named[_STEP]), max(s.end for s in named[_STEP]))
    if on_gpu:
        launches = {e.correlation_id(): e.start_ns() for e in on_host if _CALL.match(e.name())}
        kernels = [
            Span(e.name(), e.start_ns(), e.end_ns(), launches.get(e.correlation_id()))
            for e in on_gpu
            if not e.is_user_annotation()  # spans of the kernels launched in a range, not kernels
        ]
    else:
        thread = next(e.start_thread_id() for e in on_host if e.name() == _STEP)
        kernels = innermost(_spans(e for e in on_host if not e.is_user_annotation() and e.start_thread_id() == thread))
    optimizer = _spans(e for e in on_host if e.name().startswith(_OPTIMIZER))
    return step_profile(kernels, window, steps, named[_DATA], optimizer)


def _spans(events: Iterable[Any]) -> list[Span]:
    return [Span(event.name(), event.start_ns(), event.end_ns()) for event in events]


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
