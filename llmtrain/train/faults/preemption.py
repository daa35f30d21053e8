"""SIGTERM, by which a job manager takes a machine back, and Ctrl-C: every rank saves and ends at the same step boundary."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from llmtrain.distributed.processes import SAME_SIGNAL_SECONDS, saving_signals
from llmtrain.distributed.run_lock import release_all
from llmtrain.distributed.world import gloo_group
from llmtrain.errors import Preempted, signal_name


class Preemption:
    """Records one of `saving_signals` on this rank, and finds the step after which all ranks save and end.

    A collective that every step waits for would cost its latency each time. Here each step starts a reduction over a
    group of its own and reads the result of the step before, which has long arrived: the signal takes effect one step
    late, at no cost.

    group: for messages of the main thread in host memory; others may use it, all ranks in the same order.

    Use it as a context manager, in the main thread. A second signal, more than two seconds after the first, ends the
    process at once; so does the time limit, when nothing was saved by then.
    """

    def __init__(self, grace_seconds: float):
        self.grace_seconds = grace_seconds
        self.group = gloo_group()
        self.number = 0
        """The signal that all ranks have agreed on, once `signalled` was true."""
        self._signal = 0
        self._signalled_at: float | None = None
        self._timer: threading.Timer | None = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Preemption:
        self._before = {number: signal.signal(number, self._on_signal) for number in saving_signals()}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._timer is not None:
            self._timer.cancel()
        # After another error a rank may be gone, and the reduction would never end.
        if self._pending is not None and kind in (None, Preempted):
            self._pending[1].wait()
            dist.destroy_process_group(self.group)

    @property
    def seconds_left(self) -> float:
        """Seconds of the time limit that are left; all of them before the signal."""
        return self.grace_seconds - (0.0 if self._signalled_at is None else time.monotonic() - self._signalled_at)

    def signalled(self) -> bool:
        """True, on all ranks alike, if any rank had the signal one step ago. Every rank calls this after each step."""
        before, flag = self._pending, torch.tensor([self._signal], dtype=torch.int32)
        self._pending = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        if before is None:
            return False
        result, work = before
        work.wait()
        self.number = int(result.item())
        return self.number != 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signal, self._signalled_at = number, now
            self._timer = threading.Timer(self.grace_seconds, self._on_time_limit)
            self._timer.daemon = True
            self._timer.start()
            if int(os.environ.get("RANK", 0)) == 0:
                _write_stderr(
                    f"{signal_name(number)}: saving after this step, within {self.grace_seconds:g} s; a second one ends at once"
                )
        elif now - self._signalled_at > SAME_SIGNAL_SECONDS:
            _write_stderr(
                f"a second {signal_name(number)}: ending without saving; what was trained since the last checkpoint is lost"
            )
            release_all()
            os._exit(128 + number)

    def _on_time_limit(self) -> None:
        _write_stderr(f"{signal_name(self._signal)}: nothing was saved within {self.grace_seconds:g} s; ending")
        release_all()
        os._exit(128 + self._signal)


def _write_stderr(text: str) -> None:
    """Write by the system call: a signal handler may have interrupted a print, whose buffer it must not touch."""
    with contextlib.suppress(OSError):  # the terminal is gone, say
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, (text + "\n").encode())
