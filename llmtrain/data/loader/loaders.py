"""The loaders of training and validation: their sample order depends on the seed and the global batch, not on ranks or workers.

With more than one rank the process group must exist before a loader is built. The environment variables RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say which rank this is, as torchrun and composer set them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from streaming import Stream
from torch.utils.data import IterableDataset, get_worker_info

from llmtrain.data.loader.batches import Batch, collate, collate_packed, filler
from llmtrain.data.loader.checked_stream import CheckedStream
from llmtrain.data.loader.mixture import seekable_order
from llmtrain.data.loader.order import SampleOrder
from llmtrain.data.loader.shared_memory import dataset_lock
from llmtrain.data.loader.streaming import TokenDataset
from llmtrain.data.loader.worker_errors import FailingLoader, collated, or_failures
from llmtrain.data.shards.checks import require_epoch
from llmtrain.data.tokenize.end_of_document import end_of_document
from llmtrain.distributed.processes import serve_parent
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig, StreamConfig


class TrainLoader(FailingLoader):
    """Loader of the next epoch, or of its rest after a resume, at each `iter`: `len(loader)` whole global batches."""

    dataset: TokenDataset

    def __iter__(self) -> Iterator[Batch]:
        self.dataset.epoch_finished = False
        batches = super().__iter__()
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            self.dataset.epoch_finished = following is None
            yield batch
            batch = following


def _ranks() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _rank_batch_size(global_batch_size: int, replication: int) -> int:
    world_size = _ranks()[1] // replication
    if global_batch_size % world_size:
        sharers = "ranks" if replication == 1 else f"groups of {replication} ranks"
        raise UserError(
            f"the global batch of {global_batch_size} samples cannot be divided evenly over {world_size} {sharers}"
        )
    return global_batch_size // world_size


def _stream(name: str, config: StreamConfig, data: DataConfig) -> Stream:
    return CheckedStream(
        name=name,
        local=os.path.expanduser(config.local),
        remote=config.remote,
        split=config.split,
        proportion=config.proportion,
        download_retry=data.download_retries,
        download_timeout=data.download_timeout,
    )


def _loader_options(data: DataConfig) -> dict[str, Any]:
    num_workers, eod_id = data.num_workers, end_of_document(data)
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "worker_init_fn": serve_parent if num_workers else None,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": collated(collate if eod_id is None else functools.partial(collate_packed, eod_id=eod_id)),
    }


def build_train_loader(
    data: DataConfig, *, global_batch_size: int, vocab_size: int | None = None, replication: int = 1
) -> TrainLoader:
    """This rank's part of the training data: batches of global_batch_size * replication / WORLD_SIZE samples.

    replication: consecutive ranks that read the same samples.
    Raises UserError if the ranks do not divide the batch, ShardError if the data has less than one global batch; its
    iterator, when a token is not below vocab_size.
    """
    batch_size = _rank_batch_size(global_batch_size, replication)
    streams = [_stream(name, stream, data) for name, stream in data.train_streams().items()]
    dataset = train_dataset(
        data,
        streams,
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        vocab_size=vocab_size,
        replication=replication,
    )
    return TrainLoader(dataset, batch_size=batch_size, drop_last=True, **_loader_options(data))


def _seekable(data: DataConfig, global_batch_size: int, dataset: TokenDataset) -> SampleOrder:
    return seekable_order(data, global_batch_size, dataset.shard_sizes())


def train_dataset(
    data: DataConfig,
    streams: Sequence[Stream],
    *,
    batch_size: int,
    global_batch_size: int,
    vocab_size: int | None = None,
    replication: int = 1,
) -> TokenDataset:
    """The training samples of these streams in the config's order. batch_size: samples of a rank's batch. replication: as
    build_train_loader's.

    Raises ShardError if the data has less than one global batch.
    """
    options: dict[str, Any] = {
        "seq_len": data.seq_len,
        "vocab_size": vocab_size,
        "batch_size": batch_size,
        "shuffle": data.shuffle,
        "shuffle_seed": data.shuffle_seed,
        "shuffle_block_size": data.shuffle_block_size,
        "num_canonical_nodes": data.num_canonical_nodes,
        "predownload": data.predownload,
        "cache_limit": data.cache_limit,
        "readers": max(data.num_workers, 1) * int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        "replication": replication if replication > 1 else None,
    }
    if data.chosen_order == "seekable":
        options["order"] = functools.partial(_seekable, data, global_batch_size)
        options["order_name"] = data.order_name
    with dataset_lock():
        dataset = TokenDataset(streams=streams, **options)
        dataset.set_epoch_size(require_epoch(data, dataset.samples_per_stream.tolist(), global_batch_size))
    return dataset


class ValidationDataset(IterableDataset):
    """Each chosen sample once over all ranks, in order; incomplete batches are completed with fillers.

    A rank's batch holds samples of one stream alone, so that its loss is that stream's. These batches are dealt to the ranks in
    order: they are the same on any number of ranks, and all ranks have equally many. Iterable, because Composer requires a
    sampler of its own for map-style datasets.
    """

    def __init__(
        self,
        data: TokenDataset,
        names: Sequence[str],
        global_batch_size: int,
        max_samples: int | None,
        replication: int = 1,
    ) -> None:
        """names: those of the streams of `data`. replication: consecutive ranks that read the same samples."""
        self.data = data
        rank, world_size = (number // replication for number in _ranks())
        size = global_batch_size // world_size
        count = min(data.num_samples, max_samples or data.num_samples)
        # Evenly spaced: representative of all samples.
        chosen = np.arange(count) * data.num_samples // count
        begins = [int(begin) for begin in data.sample_offset_per_stream]
        parts = np.split(chosen, np.searchsorted(chosen, begins[1:]))
        ids = np.concatenate([_padded(part, size) for part in parts])
        self.sample_ids = _padded(ids, global_batch_size).reshape(-1, world_size, size)[:, rank]
        """[batches, samples per batch], -1 for fillers."""
        ranges = map(range, begins, [*begins[1:], data.num_samples])
        self.streams = dict(zip(names, ranges, strict=True))
        """Ids of the samples of each stream, chosen or not."""
        self.unused = [name for name, part in zip(names, parts, strict=True) if not len(part)]
        """Streams of which no sample is chosen."""

    def __len__(self) -> int:
        return self.sample_ids.size

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples, through `or_failures`."""
        yield from or_failures(self._samples())

    def _samples(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for sample_id in self.sample_ids[worker::workers].flat:
            yield filler(self.data.seq_len) if sample_id < 0 else self.data.get_item(int(sample_id))


class ValidationLoader(FailingLoader):
    """Loader of a ValidationDataset: all of it at each `iter`."""

    dataset: ValidationDataset


def _padded(sample_ids: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(sample_ids, (0, -len(sample_ids) % multiple), constant_values=-1)


def build_validation_loader(
    data: DataConfig,
    *,
    global_batch_size: int,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    replication: int = 1,
) -> ValidationLoader | None:
    """This rank's part of the validation data, not shuffled, or None if the config names none.

    Fillers have sample_id -1 and only ignored labels, so a mean over batches must be weighted by labels, and a rank's
    batch may have none. max_samples: number of samples to take, evenly spaced. replication: as build_train_loader's.
    Raises UserError if the ranks do not divide the batch.
    """
    streams = data.validation_streams()
    if not streams:
        return None
    batch_size = _rank_batch_size(global_batch_size, replication)
    with dataset_lock():
        samples = TokenDataset(
            seq_len=data.seq_len,
            vocab_size=vocab_size,
            streams=[_stream(name, stream, data) for name, stream in streams.items()],
        )
    dataset = ValidationDataset(samples, list(streams), global_batch_size, max_samples, replication)
    return ValidationLoader(dataset, batch_size=batch_size, **_loader_options(data))
