"""Shards brought into their folders before they are read: a thread for each process that reads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

_POLL = 0.01
"""Seconds between two looks at how far was read."""
_MOST = 1024
"""Samples looked at together."""


class ReadAhead:
    """A context in which a thread prepares the shards of samples in order, up to `ahead` samples before those that are read.

    shards: the shards of the samples begin to end of so many as there are, in order. prepare: has one in its folder; returns
    false if it is no use to go on.
    """

    def __init__(
        self, shards: Callable[[int, int], np.ndarray], total: int, ahead: int, prepare: Callable[[int], bool]
    ):
        self._shards, self._total, self._ahead, self._prepare = shards, total, ahead, prepare
        self.read = 0
        """Samples that were read, or are being read."""
        self._stopped = threading.Event()
        # A daemon: the process may end while a download goes on.
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _run(self) -> None:
        begin = 0
        while begin < self._total:
            end = min(self.read + self._ahead, begin + _MOST, self._total)
            if end <= begin:
                if self._stopped.wait(_POLL):
                    return
                continue
            for shard in dict.fromkeys(self._shards(begin, end).tolist()):
                if self._stopped.is_set() or not self._prepare(shard):
                    return
            begin = max(end, self.read)
