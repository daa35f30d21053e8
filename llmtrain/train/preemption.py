"""SIGTERM, by which a job manager takes a machine back: noted at once, acted upon at a step boundary by all ranks."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.distributed.world import gloo_group

STATUS = 128 + signal.SIGTERM
"""Exit status of a run that was preempted."""
_SAME_SIGNAL_SECONDS = 2.0
"""A job manager may signal the launcher and the ranks at once, and the launcher passes it on: that is one SIGTERM."""


class Preempted(Exception):
    """The run ends before its time, with a checkpoint at `step`."""

    def __init__(self, step: int, folder: Path):
        super().__init__(f"SIGTERM: saved step {step} in {folder}; the same command continues from there")
        self.step = step


class Preemption:
    """Notes SIGTERM on this rank, and lets all ranks agree on the step after which they save and end.

    A collective that every step waits for would cost its latency each time. Here each step starts a reduction over a
    group of its own and looks at the one before, which has long arrived: so ranks agree one step late, for free.

    Use it as a context manager, in the main thread. A second SIGTERM, more than two seconds after the first, ends the
    process at once; so does the time limit, when nothing was saved by then.
    """

    def __init__(self, grace_seconds: float):
        self.grace_seconds = grace_seconds
        self._group = gloo_group()
        self._noted_at: float | None = None
        self._timer: threading.Timer | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._before: Any = None

    def __enter__(self) -> Preemption:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if self._timer is not None:
            self._timer.cancel()
        if self._pending is not None and kind in (None, Preempted):  # else a rank may be gone, and not answer
            self._pending[1].wait()
            dist.destroy_process_group(self._group)

    @property
    def seconds_left(self) -> float:
        """Of the time limit; all of it before the signal."""
        return self.grace_seconds - (0.0 if self._noted_at is None else time.monotonic() - self._noted_at)

    def agreed(self) -> bool:
        """Called by every rank after each step: whether any rank had noted the signal one step ago. The same on all."""
        before, flag = self._pending, torch.tensor([self._noted_at is not None], dtype=torch.int32)
        self._pending = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if before is None:
            return False
        result, work = before
        work.wait()
        return bool(result.item())

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
            self._timer = threading.Timer(self.grace_seconds, self._give_up)
            self._timer.daemon = True
            self._timer.start()
            if int(os.environ.get("RANK", 0)) == 0:
                _say(f"SIGTERM: saving after this step, within {self.grace_seconds:g} s; a second one ends at once")
        elif now - self._noted_at > _SAME_SIGNAL_SECONDS:
            _say("a second SIGTERM: ending without saving")
            os._exit(STATUS)

    def _give_up(self) -> None:
        _say(f"SIGTERM: nothing was saved within {self.grace_seconds:g} s; ending")
        os._exit(STATUS)


def _say(text: str) -> None:
    """By the system call: a handler may have interrupted a print, whose buffer it must not touch."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, (text + "\n").encode())
