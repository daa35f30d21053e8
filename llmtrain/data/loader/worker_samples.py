"""The samples of one loader worker of one rank, as a sequence that is computed when it is read. No torch here."""

import functools
from dataclasses import dataclass

import numpy as np

from llmtrain.data.loader.order import SampleOrder

_CHUNK = 1024


@dataclass(frozen=True)
class Reader:
    """A loader worker: number `worker` of `workers` of rank `rank` of `ranks`."""

    rank: int
    ranks: int
    worker: int
    workers: int


class WorkerSamples:
    """Sample ids of a reader from a position of an epoch to its end, batch by batch.

    A rank's batch is its part of the global batch; a rank's workers take its batches in turn.
    """

    def __init__(self, order: SampleOrder, reader: Reader, *, begin: int, done: int, size: int):
        """begin: position at which the epoch begins. done: samples of it that all ranks have read. size: samples of an epoch.
        All three are multiples of the global batch."""
        self._order, self._reader, self._begin = order, reader, begin
        self._batch = order.global_batch // reader.ranks
        self._steps = range(done // order.global_batch + reader.worker, size // order.global_batch, reader.workers)
        self._chunk = functools.lru_cache(maxsize=8)(self._ids)

    def __len__(self) -> int:
        return len(self._steps) * self._batch

    def __getitem__(self, index: int) -> int:
        chunk, within = divmod(index, _CHUNK)
        return int(self._chunk(chunk)[within])

    def _ids(self, chunk: int) -> np.ndarray:
        batch, within = np.divmod(np.arange(chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(self))), self._batch)
        step = self._steps.start + batch * self._reader.workers
        positions = self._begin + step * self._order.global_batch + self._reader.rank * self._batch + within
        return self._order.ids(positions)
