"""Profiles some steps of a run: a trace for Perfetto, a memory snapshot, and a table of where the time goes."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger
from torch.profiler import profile

from llmtrain.config.held_folder import make_folder
from llmtrain.distributed.world import World
from llmtrain.logs import run_log
from llmtrain.schema.training import Profile
from llmtrain.train.callbacks.step_recorder import StepRecorder, breakdown
from llmtrain.train.report.step_profile import StepProfile, table


class Profiling(StepRecorder):
    """Writes RUN/profile/step-N, N the last profiled step: `breakdown.json` of all ranks, and of rank 0 and of the rank that
    the others wait for a `rank*.trace.json.gz` (ui.perfetto.dev opens it) and a `rank*.memory.pickle`
    (pytorch.org/memory_viz). Every rank must have one."""

    def __init__(self, config: Profile, folder: Path, world: World):
        super().__init__()
        self.config = config
        self.folder = folder / "profile"
        self.world = world
        self._seen = 0  # steps of this process

    def wanted(self, state: State) -> bool:
        return self._seen == self.config.after

    def enough(self, state: State) -> bool:
        return self._seen == self.config.after + self.config.steps

    def batch_end(self, state: State, logger: Logger) -> None:
        self._seen += 1
        super().batch_end(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.recording is not None or self._seen <= self.config.after:
            run_log.warning(
                f"no profile: the run made {self._seen} steps, and train.profile asks for {self.config.steps} after "
                f"{self.config.after}"
            )
        if self.recording is not None:
            self.stop()

    def begin(self) -> None:
        if self.config.memory and self.gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        super().begin()

    def finish(self, profiler: profile, state: State, logger: Logger) -> None:
        folder = self.folder / f"step-{state.timestamp.batch.value:08d}"
        found = breakdown(profiler, self.config.steps)
        ranks = _gather(found, self.world)
        slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].working)
        if self.world.rank in (0, slowest):
            make_folder(folder)
            profiler.export_chrome_trace(str(folder / f"rank{self.world.rank}.trace.json.gz"))
            if self.config.memory and self.gpu:
                torch.cuda.memory._dump_snapshot(str(folder / f"rank{self.world.rank}.memory.pickle"))
        if self.config.memory and self.gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
        if self.world.is_main:
            (folder / "breakdown.json").write_text(json.dumps([asdict(rank) for rank in ranks], indent=1) + "\n")
            shown = {"rank 0": ranks[0]} | ({f"rank {slowest}, slowest": ranks[slowest]} if slowest else {})
            for line in (*table(shown), f"profile of {self.config.steps} steps: {folder}"):
                run_log.info(line)
            if self.config.memory and not self.gpu:
                run_log.warning("no memory snapshot: there is no GPU")


def _gather(found: StepProfile, world: World) -> Sequence[StepProfile]:
    if world.size == 1:
        return [found]
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, found)
    return ranks
