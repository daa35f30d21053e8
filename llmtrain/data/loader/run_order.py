"""The samples of each step of a run, computed from its config and its shards' sizes: nothing is read of them, or written.

The order does not depend on ranks, nodes or loader workers, so that it holds for a run that was resumed on others.
"""

import functools
from collections.abc import Sequence

import numpy as np

from llmtrain.data.loader.mixture import seekable_order
from llmtrain.data.shards.checks import require_epoch
from llmtrain.data.shards.index import Index
from llmtrain.schema.data import DataConfig


class RunOrder:
    """Sample ids of the steps of a run. They number the samples of all training streams, in the order of the config.

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
