"""The samples that a run takes at given steps, with the documents in them, and the shares of its streams over time."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.inspect.sample_documents import SourceDocument, in_order_of_partitions
from llmtrain.data.loader.mixture import seekable_order
from llmtrain.data.shards.checks import require_epoch
from llmtrain.data.shards.index import Index
from llmtrain.data.shards.stored_stream import StoredStream, open_stream
from llmtrain.schema.data import DataConfig


class RunOrder:
    """Sample ids of the steps of a run, computed from its config and its shards' sizes, whatever ranks, nodes and loader workers it
    has. They number the samples of all training streams, in the order of the config.

    indexes: of the training streams. Raises ShardError if they hold less than one global batch.
    """

    def __init__(self, data: DataConfig, global_batch_size: int, indexes: Sequence[Index]):
        self._data, self._batch, self._indexes = data, global_batch_size, indexes
        samples = [index.samples for index in indexes]
        self.steps_per_epoch = require_epoch(data, samples, global_batch_size) // global_batch_size
        if data.chosen_order == "seekable":
            sizes = [np.asarray(index.shards.samples) for index in indexes]
            self._seekable = seekable_order(data, global_batch_size, sizes)
        else:
            self._seekable = None
        self._epoch = functools.lru_cache(maxsize=2)(self._listed)

    def ids(self, steps: range) -> np.ndarray:
        """Sample ids of the global batches of these steps, which are counted from 0. int64 [len(steps), global batch]."""
        if self._seekable is not None:
            first = np.arange(steps.start, steps.stop, dtype=np.int64)[:, None] * self._batch
            return self._seekable.ids(first + np.arange(self._batch))
        rows = [self._epoch(step // self.steps_per_epoch)[step % self.steps_per_epoch] for step in steps]
        return np.stack(rows) if rows else np.zeros((0, self._batch), np.int64)

    def _listed(self, epoch: int) -> np.ndarray:
        """An epoch in StreamingDataset's order, which is a list of all of it. int64 [steps, global batch]."""
        from streaming.base.world import World  # imports torch

        from llmtrain.data.loader.streaming_order import StreamingOrder

        sizes = [np.asarray(index.shards.samples) for index in self._indexes]
        order = StreamingOrder(self._data, sizes, self.steps_per_epoch * self._batch, self._batch)
        world = World(num_nodes=1, ranks_per_node=1, workers_per_rank=1, worker=0)
        return order.ids(world, epoch, 0).reshape(-1, self._batch)


_CHUNK_SAMPLES = 1 << 16
"""Samples that are looked up together, so that each partition's documents are read once for them."""


@dataclass(frozen=True)
class SeenSample:
    """A sample at a step, counted from 1. sample: its number among those of all streams, as training reports it; row: its number
    in the shard. documents: None where they were not recorded."""

    step: int
    sample: int
    stream: str
    shard: str
    row: int
    documents: list[SourceDocument] | None

    def as_json(self) -> dict[str, Any]:
        """All of it, with the tokens [begin, end) of the sample that each document has."""
        documents = self.documents and [
            {"file": one.place, one.unit: one.number, "tokens": [one.begin, one.end]}
            if one.number is not None
            else {"file": one.place, "tokens": [one.begin, one.end]}
            for one in self.documents
        ]
        return vars(self) | {"documents": documents}


class SeenData:
    """The training data of a run, step by step. Steps count from 1, as the log has them.

    passed_over: [step, steps' worth of data that was passed over behind it], as checkpoints of a run that was rewound have them.
    Raises ShardError where an index cannot be had, or the data has less than one global batch.
    """

    def __init__(self, data: DataConfig, global_batch_size: int, passed_over: Sequence[Sequence[int]] = ()):
        self._passed_over = passed_over
        self.streams = [open_stream(name, stream) for name, stream in data.train_streams().items()]
        self.order = RunOrder(data, global_batch_size, [stream.index for stream in self.streams])
        self._begins = np.cumsum([0, *(stream.index.samples for stream in self.streams)])
        self.seq_len = data.seq_len
        self._documents = [stream.documents(data.seq_len) for stream in self.streams]
        self._chunk = max(_CHUNK_SAMPLES // global_batch_size, 1)

    @property
    def unrecorded(self) -> list[str]:
        """Streams whose shards come without a record of their documents."""
        return [one.name for one, look_up in zip(self.streams, self._documents, strict=True) if not look_up.recorded]

    def place(self, sample: int) -> tuple[StoredStream, int]:
        """The stream of a sample, and its number there."""
        number = int(np.searchsorted(self._begins, sample, side="right")) - 1
        return self.streams[number], sample - int(self._begins[number])

    def samples(self, first: int, last: int) -> Iterator[SeenSample]:
        """The samples of the steps from `first` to `last`, in their order."""
        for steps in self._chunks(first, last):
            ids = self._ids(steps)
            documents = self._look_up(ids)
            for step, batch in zip(steps, ids.tolist(), strict=True):
                for sample in batch:
                    stream, number = self.place(sample)
                    shard, row = stream.shard_of(number)
                    name = stream.index.shards[shard]["raw_data"]["basename"]
                    yield SeenSample(step + 1, sample, stream.name, name, row, documents.get(sample))

    def counts(self, first: int, last: int) -> NDArray[np.int64]:
        """Samples of each stream at each of the steps: [steps, streams]."""
        found = [np.zeros((0, len(self.streams)), np.int64)]
        for steps in self._chunks(first, last):
            stream = np.searchsorted(self._begins, self._ids(steps), side="right") - 1
            found.append(np.stack([(stream == number).sum(axis=1) for number in range(len(self.streams))], axis=1))
        return np.concatenate(found)

    def _chunks(self, first: int, last: int) -> Iterator[range]:
        """Steps, counted from 0, that are looked up together: the data of all is as far from where it would be without rewinds."""
        if last < first:
            return
        borders = sorted({first - 1, last, *(step for step, _ in self._passed_over if first - 1 < step < last)})
        for low, high in itertools.pairwise(borders):
            for begin in range(low, high, self._chunk):
                yield range(begin, min(begin + self._chunk, high))

    def _ids(self, steps: range) -> NDArray[np.int64]:
        """Sample ids of one of `_chunks`."""
        shift = sum(count for step, count in self._passed_over if step <= steps.start)
        return self.order.ids(range(steps.start + shift, steps.stop + shift))

    def _look_up(self, ids: NDArray[np.int64]) -> dict[int, list[SourceDocument] | None]:
        found = {}
        for number, (begin, look_up) in enumerate(zip(self._begins[:-1].tolist(), self._documents, strict=True)):
            end = int(self._begins[number + 1])
            mine = np.unique(ids[(ids >= begin) & (ids < end)]) - begin
            if look_up.recorded:
                for sample in in_order_of_partitions(mine.tolist(), look_up):
                    found[begin + sample] = look_up.of(sample)
        return found


def share_lines(names: Sequence[str], counts: NDArray[np.int64], seq_len: int) -> Iterator[str]:
    """Each stream's share of the samples, and tokens. counts: [steps, streams]."""
    total = max(int(counts.sum()), 1)
    for name, count in zip(names, counts.sum(axis=0).tolist(), strict=True):
        yield f"{name}: {100 * count / total:.1f} % of the samples, {count:,} of {total:,}, {count * seq_len:,} tokens"
