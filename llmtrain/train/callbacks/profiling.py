"""Profiles some steps of a run: a trace for Perfetto, a memory snapshot, and a table of where the time goes."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch.profiler import ProfilerActivity, profile, record_function

from llmtrain.distributed.world import World
from llmtrain.logs import run_log
from llmtrain.schema.training import Profile
from llmtrain.train.step_profile import Span, StepProfile, innermost, step_profile, table

_STEP, _DATA, _OPTIMIZER = "llmtrain.step", "llmtrain.data", "llmtrain.optimizer"
_OF_TORCH = "Optimizer.step#"


class Profiling(Callback):
    """Writes RUN/profile/step-N, N the last profiled step: `breakdown.json` of all ranks, and of rank 0 and of the rank that
    the others wait for a `rank*.trace.json.gz` (ui.perfetto.dev opens it) and a `rank*.memory.pickle`
    (pytorch.org/memory_viz). Every rank must have one."""

    def __init__(self, config: Profile, folder: Path, world: World):
        self.config = config
        self.folder = folder / "profile"
        self.world = world
        self._seen = 0  # steps of this process
        self._profiler: profile | None = None
        self._ranges = contextlib.ExitStack()
        self._data = contextlib.ExitStack()
        self._gpu = torch.cuda.is_available()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self._seen == self.config.after and self._profiler is None:
            self._begin()
        if self._profiler is not None:
            self._ranges.enter_context(record_function(_STEP))
            self._data.enter_context(record_function(_DATA))

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self._data.close()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # Composer runs forward and backward passes within Optimizer.step; from here on it is the optimizer.
        if self._profiler is not None:
            with record_function(_OPTIMIZER):
                pass

    def batch_end(self, state: State, logger: Logger) -> None:
        self._seen += 1
        if self._profiler is None:
            return
        last = self._seen == self.config.after + self.config.steps
        if last and self._gpu:
            torch.cuda.synchronize()
        self._ranges.close()
        if last:
            self._end(self.folder / f"step-{state.timestamp.batch.value:08d}")

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._profiler is not None or self._seen <= self.config.after:
            run_log.warning(
                f"no profile: the run made {self._seen} steps, and train.profile asks for {self.config.steps} after "
                f"{self.config.after}"
            )
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _begin(self) -> None:
        if self.config.memory and self._gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        if self._gpu:
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cycles, which a profile from start to stop has not
            self._profiler = profile(activities=activities)
            self._profiler.start()

    def _end(self, folder: Path) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        found = breakdown(profiler, self.config.steps)
        ranks = _gather(found, self.world)
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].working)
        if self.world.rank in (0, slowest):
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"rank{self.world.rank}.trace.json.gz"))
            if self.config.memory and self._gpu:
                torch.cuda.memory._dump_snapshot(str(folder / f"rank{self.world.rank}.memory.pickle"))
        if self.config.memory and self._gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.world.is_main:
            (folder / "breakdown.json").write_text(json.dumps([asdict(rank) for rank in ranks], indent=1) + "\n")
            shown = {"rank 0": ranks[0]} | ({f"rank {slowest}, slowest": ranks[slowest]} if slowest else {})
            for line in (*table(shown), f"profile of {self.config.steps} steps: {folder}"):
                run_log.info(line)
            if self.config.memory and not self._gpu:
                run_log.warning("no memory snapshot: there is no GPU")


def breakdown(profiler: profile, steps: int) -> StepProfile:
    """The parts of a stopped profile. Without a GPU, operators of the thread that trains stand for kernels."""
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    on_host = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    on_gpu = [e for e in events if e.device_type() != torch.autograd.DeviceType.CPU]
    named = {name: _spans(e for e in on_host if e.name() == name) for name in (_STEP, _DATA, _OPTIMIZER)}
    window = Span(_STEP, min(s.start for s in named[_STEP]), max(s.end for s in named[_STEP]))
    if on_gpu:
        launches = {e.correlation_id(): e.start_ns() for e in on_host if e.correlation_id()}
        kernels = [
            Span(e.name(), e.start_ns(), e.end_ns(), launches.get(e.correlation_id()))
            for e in on_gpu
            if not e.is_user_annotation()  # spans of the kernels launched in a range, not kernels
        ]
    else:
        thread = next(e.start_thread_id() for e in on_host if e.name() == _STEP)
        kernels = innermost(_spans(e for e in on_host if not e.is_user_annotation() and e.start_thread_id() == thread))
    of_torch = _spans(e for e in on_host if e.name().startswith(_OF_TORCH))
    optimizer = [
        replace(begin, end=around.end)
        for begin in named[_OPTIMIZER]
        for around in of_torch
        if around.start <= begin.start < around.end
    ]
    return step_profile(kernels, window, steps, named[_DATA], optimizer)


def _spans(events: Iterable[Any]) -> list[Span]:
    return [Span(event.name(), event.start_ns(), event.end_ns()) for event in events]


def _gather(found: StepProfile, world: World) -> Sequence[StepProfile]:
    if world.size == 1:
        return [found]
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, found)
    return ranks
