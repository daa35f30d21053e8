"""The training samples of one rank, epoch by epoch, from any position."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from streaming.base.world import World
from torch.utils.data import IterableDataset

from llmtrain.data.loader.cached_stream import CachedStream
from llmtrain.data.loader.mixture import seekable_order
from llmtrain.data.loader.order import SampleOrder
from llmtrain.data.loader.streaming_order import StreamingOrder
from llmtrain.data.loader.token_samples import TokenSamples
from llmtrain.data.loader.workers import or_failures
from llmtrain.data.shards.checks import require_epoch
from llmtrain.schema.data import DataConfig

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


_PREDOWNLOAD_BATCHES = 8
"""Batches of a rank that are fetched ahead where the config does not say how many samples are."""


def _of_stage(world: World, stages: int) -> World:
    """The ranks of this rank's stage alone."""
    if stages == 1:
        return world
    ranks, per_node = world.num_ranks // stages, world.ranks_per_node
    nodes = ranks // per_node if ranks % per_node == 0 else 1
    return World(nodes, ranks // nodes, world.workers_per_rank, world.worker % (ranks * world.workers_per_rank))


class TokenDataset(TokenSamples, IterableDataset):
    """This rank's samples of an epoch at each `iter`, in the config's order.

    Where it is in the data is known by itself alone: a copy of it in a loader process counts the epochs that it begins, as the
    training process does (`begin_epoch`), so that they need no memory in common.
    """

    def __init__(
        self,
        data: DataConfig,
        streams: Sequence[CachedStream],
        *,
        global_batch_size: int,
        vocab_size: int | None = None,
        replication: int = 1,
        stages: int = 1,
    ) -> None:
        """replication, stages: as build_train_loader's. Raises ShardError if the data has less than one global batch,
        and as TokenSamples does."""
        readers = max(data.num_workers, 1) * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        super().__init__(
            streams, seq_len=data.seq_len, vocab_size=vocab_size, cache_limit=data.cache_limit, readers=readers
        )
        self._data, self._global_batch = data, global_batch_size
        world = _of_stage(World.detect(), stages)
        self._world = world.replicate(replication) if replication > 1 else world
        self._ahead = data.predownload or _PREDOWNLOAD_BATCHES * (global_batch_size // self._world.num_ranks)
        self.epoch_size = require_epoch(data, self.samples_per_stream.tolist(), global_batch_size)
        self._streaming = None
        if data.chosen_order == "streaming":
            self._streaming = StreamingOrder(data, self.shard_sizes(), self.epoch_size, global_batch_size)
        self._position = self._following = (0, 0)
        self._initial_nodes = self._world.num_nodes
        self.epoch_finished = False
        """Set by TrainLoader after an epoch's last batch."""
        self.loaded = 0
        """Number of positions that were loaded."""

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return self.epoch_size // self._world.num_ranks

    @functools.cached_property
    def order(self) -> SampleOrder | None:
        """The order of samples; None for StreamingDataset's, which is a list of an epoch."""
        if self._streaming is not None:
            return None
        return seekable_order(self._data, self._global_batch, self.shard_sizes())

    def begin_epoch(self) -> tuple[int, int]:
        """Go on to the next epoch, or to what is left of the one that was loaded. Returns (epoch, samples of it that all ranks
        have read)."""
        self._position = self._following
        self._following = (self._position[0] + 1, 0)
        return self._position

    def __iter__(self) -> Iterator[Any]:
        """This process's samples of the next epoch, through `or_failures`."""
        return or_failures(self._samples(*self.begin_epoch()))

    def _samples(self, epoch: int, done: int) -> Iterator[dict[str, Any]]:
        work = self._work(epoch, done)
        if not any(stream.is_made for stream in self.streams):
            for number in range(len(work)):
                yield self.get_item(work[number])
            return

        def shards(begin: int, end: int) -> np.ndarray:
            return self.shards_of(np.array([work[number] for number in range(begin, end)]))

        with ReadAhead(shards, len(work), self._ahead, self.prepare_ahead) as ahead:
            for number in range(len(work)):
                ahead.read = number
                yield self.get_item(work[number])

    def _work(self, epoch: int, done: int) -> WorkerSamples | np.ndarray:
        """The ids of this process's samples for the rest of an epoch."""
        world = self._world.detect_workers()
        if self._streaming is not None:
            return self._streaming.ids(world, epoch, done)
        assert self.order is not None
        reader = Reader(world.rank, world.num_ranks, world.worker_of_rank, world.workers_per_rank)
        return WorkerSamples(self.order, reader, begin=epoch * self.epoch_size, done=done, size=self.epoch_size)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Position in the data, as Composer saves it: num_samples of this epoch are done, counted over all ranks.
        from_beginning: of the epoch; otherwise, of what a loaded position left of it.

        An epoch begins when the loader is iterated again, so that between two epochs, where Composer counts 0 samples, the
        position is the one behind the epoch that has ended."""
        epoch, done = self._position
        if from_beginning and num_samples == 0 and self.epoch_finished:
            epoch += 1
        return {
            "epoch": epoch,
            "sample_in_epoch": num_samples if from_beginning else done + num_samples,
            "num_canonical_nodes": self._data.num_canonical_nodes,
            "shuffle_seed": self._data.shuffle_seed,
            "initial_physical_nodes": self._initial_nodes,
            "order": self._data.order_name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position at the next `iter`. Positions that StreamingDataset saved hold as well."""
        epoch = int(state["epoch"])  # -1 of a run that had not begun
        self._position = self._following = (epoch, int(state["sample_in_epoch"])) if epoch >= 0 else (0, 0)
        self._initial_nodes = state.get("initial_physical_nodes") or self._world.num_nodes
        if self._streaming is not None:
            self._streaming.load(state)
        self.epoch_finished = False
        self.loaded += 1
