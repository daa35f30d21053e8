"""StreamingDataset's own order of samples (`data.order: streaming`), for runs that began with it: a list of each epoch.

The list is made by StreamingDataset's functions from the shards' sizes alone, in every process that reads by it.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from streaming import StreamingDataset
from streaming.base.batching import generate_work
from streaming.base.world import World

from llmtrain.schema.data import DataConfig


class StreamingOrder:
    """The settings and sizes that StreamingDataset's order follows from, under its names for them."""

    sampling_method, sampling_granularity, partition_algo, shuffle_algo = "balanced", 1, "relaxed", "py1e"
    """StreamingDataset's defaults."""
    resample_streams = StreamingDataset.resample_streams

    def __init__(self, data: DataConfig, sizes: Sequence[np.ndarray], epoch_size: int, global_batch_size: int) -> None:
        """sizes: samples of each shard, by stream. epoch_size: samples of an epoch."""
        self.num_canonical_nodes, self.shuffle_seed = data.num_canonical_nodes, data.shuffle_seed
        self.shuffle = self.epoch_seed_change = data.shuffle
        self._data, self._global_batch, self.epoch_size = data, global_batch_size, epoch_size
        self.batch_size = global_batch_size
        self.initial_physical_nodes: int | None = None
        self.num_streams = len(sizes)
        self.samples_per_shard = np.concatenate(sizes)
        self.sample_offset_per_shard = self.samples_per_shard.cumsum() - self.samples_per_shard
        self.shards_per_stream = np.array([len(one) for one in sizes], np.int64)
        self.shard_offset_per_stream = self.shards_per_stream.cumsum() - self.shards_per_stream
        given = [stream.proportion for stream in data.train_streams().values()]
        shares = np.array(given if all(given) else [one.sum() for one in sizes], np.float64)
        exact = shares / shares.sum() * epoch_size
        choose = np.floor(exact).astype(np.int64)  # the largest remainders are rounded up
        choose[np.argsort(choose - exact, kind="stable")[: epoch_size - choose.sum()]] += 1
        self.streams = [SimpleNamespace(choose=int(one)) for one in choose]

    @property
    def shuffle_block_size(self) -> int:
        """Samples that are shuffled together; StreamingDataset's own choice where the config makes none."""
        return self._data.shuffle_block_size or max(4_000_000 // self.num_canonical_nodes, 1 << 18)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what the order of a saved position depends on."""
        self.num_canonical_nodes, self.shuffle_seed = state["num_canonical_nodes"], state["shuffle_seed"]
        self.initial_physical_nodes = state.get("initial_physical_nodes")

    def ids(self, world: World, epoch: int, done: int) -> np.ndarray:
        """Ids of the samples that a loader process reads of an epoch. world: of that process. done: samples of the epoch that all
        ranks have read."""
        self.batch_size = self._global_batch // world.num_ranks
        work = generate_work("random", cast(StreamingDataset, self), world, epoch, done)
        ids = work[world.node, world.rank_of_node, world.worker_of_rank].flatten()
        return ids[ids >= 0]
