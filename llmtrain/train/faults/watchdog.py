"""A watchdog for steps that hang: which rank is where, and in which collective."""

import contextlib
import json
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from types import FrameType

from composer.core import Callback, State
from composer.loggers import Logger

from llmtrain.config.held_folder import make_folder
from llmtrain.distributed.world import World
from llmtrain.errors import first_few
from llmtrain.logs import log

_USUAL = 3
"""Steps after the first from which on there is a usual time."""
_OTHERS = 5.0
"""Seconds for the other ranks to write where they are."""


class Watchdog(Callback):
    """Reports a step that takes `factor` times the usual one, and at least `least` seconds; training goes on.

    Every rank writes its stack to RUN/errors/hang-rankN.txt. Rank 0 logs which ranks wait in which collective, which are elsewhere,
    and which have written nothing: their processes do not run. The first step has no usual time, and what comes between two steps
    (evaluation, saves) is not watched; there PyTorch's own time limit of collectives holds.
    """

    def __init__(self, folder: Path, world: World, factor: float = 10.0, least: float = 60.0):
        self.folder, self.world, self.factor, self.least = folder / "errors", world, factor, least
        self._times: deque[float] = deque(maxlen=50)
        self._began: tuple[int, float] | None = None
        self._warm = False
        self._over = threading.Event()

    def fit_start(self, state: State, logger: Logger) -> None:
        with contextlib.suppress(OSError):
            self._file(self.world.rank).unlink(missing_ok=True)
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="watchdog", daemon=True).start()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._began = (state.timestamp.batch.value + 1, time.monotonic())

    def batch_end(self, state: State, logger: Logger) -> None:
        began, self._began = self._began, None
        if began is not None and self._warm:
            self._times.append(time.monotonic() - began[1])
        self._warm = True

    def fit_end(self, state: State, logger: Logger) -> None:
        self._over.set()

    def close(self, state: State, logger: Logger) -> None:
        self._over.set()

    def _watch(self, thread: int) -> None:
        reported = 0
        while not self._over.wait(min(1.0, self.least / 4)):
            began, times = self._began, list(self._times)
            if began is None or began[0] == reported or len(times) < _USUAL:
                continue
            usual, seconds = statistics.median(times), time.monotonic() - began[1]
            if seconds < max(self.factor * usual, self.least):
                continue
            reported = began[0]
            self._write(reported, sys._current_frames()[thread])
            if self.world.is_main:
                self._over.wait(min(_OTHERS, self.least))
                log.warning(
                    f"WARNING: step {reported} has taken {seconds:.0f} s, and a usual one takes {usual:.2g} s: "
                    f"{self._describe(reported)}. Stacks: {self.folder}/hang-rank*.txt"
                )

    def _file(self, rank: int) -> Path:
        return self.folder / f"hang-rank{rank}.txt"

    def _write(self, step: int, frame: FrameType) -> None:
        """Write where this rank is: a line for rank 0, and the stack."""
        summary = json.dumps({"step": step, "where": place(frame)})
        with contextlib.suppress(OSError):
            make_folder(self.folder)
            self._file(self.world.rank).write_text(f"{summary}\n{''.join(traceback.format_stack(frame))}")

    def _describe(self, step: int) -> str:
        ranks: dict[str, list[str]] = {}
        for rank in range(self.world.size):
            where = "silent: the process does not run, or its folder is another"
            with contextlib.suppress(OSError, ValueError, KeyError):
                found = json.loads(self._file(rank).read_text().partition("\n")[0])
                where = found["where"] if found["step"] == step else "at another step"
            ranks.setdefault(where, []).append(str(rank))
        # Those that few ranks have are the cause: the others wait for them.
        listed = sorted(ranks.items(), key=lambda item: len(item[1]))
        return "; ".join(f"rank{'s' * (len(of) > 1)} {first_few(of, 8)} {where}" for where, of in listed)


def place(frame: FrameType) -> str:
    """The place of a thread: in a collective, or else at a line of ours. NCCL's recorder has the collective that the GPU is in."""
    stack = traceback.extract_stack(frame)
    collective = next((one for one in reversed(stack) if "/torch/distributed/" in one.filename), None)
    ours = next((one for one in reversed(stack) if "/llmtrain/" in one.filename), stack[-1])
    at = f"{ours.name} ({Path(ours.filename).name}:{ours.lineno})"
    last = _last_on_the_gpu()
    on_gpu = f", last collective on the GPU: {last}" if last else ""
    return f"in the collective {collective.name}, from {at}{on_gpu}" if collective else f"in {at}{on_gpu}"


def _last_on_the_gpu() -> str | None:
    """The newest entry of PyTorch's flight recorder, which NCCL's and RCCL's groups fill."""
    with contextlib.suppress(Exception):  # a private function, for what no public one has
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        last = json.loads(_dump_fr_trace_json())["entries"][-1]
        return f"{last['profiling_name']} {last['state']}"
    return None
