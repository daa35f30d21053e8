"""The loaders of training and validation: their sample order depends on the seed and the global batch, not on ranks or workers.

The environment variables RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say which rank this is, as torchrun and composer set
them. Ranks and loader processes do not wait for one another.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from llmtrain.data.loader.batches import Batch, collate, collate_packed, filler
from llmtrain.data.loader.cached_stream import CachedStream
from llmtrain.data.loader.token_dataset import TokenDataset
from llmtrain.data.loader.token_samples import TokenSamples
from llmtrain.data.loader.workers import FailingLoader, begin_worker, collated, or_failures
from llmtrain.data.tokenize.end_of_document import end_of_document
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig


class TrainLoader(FailingLoader):
    """Loader of the next epoch, or of its rest after a resume, at each `iter`: `len(loader)` whole global batches."""

    dataset: TokenDataset
    _position = 0
    """The position, of those that were loaded, from which the running processes began."""

    def __iter__(self) -> Iterator[Batch]:
        self.dataset.epoch_finished = False
        if self._position != self.dataset.loaded:
            self._position = self.dataset.loaded
            if self._iterator is not None:  # its processes do not have that position
                self._iterator._shutdown_workers()  # pyright: ignore[reportAttributeAccessIssue]
                self._iterator = None
        batches = super().__iter__()
        batch = next(batches, None)
        if self.num_workers:
            self.dataset.begin_epoch()  # as each of them did
        while batch is not None:
            following = next(batches, None)
            self.dataset.epoch_finished = following is None
            yield batch
            batch = following


def _ranks(stages: int) -> tuple[int, int]:
    """Rank and number of ranks of this rank's stage."""
    size = int(os.environ.get("WORLD_SIZE", 1)) // stages
    return int(os.environ.get("RANK", 0)) % size, size


def _rank_batch_size(global_batch_size: int, replication: int, stages: int) -> int:
    world_size = _ranks(stages)[1] // replication
    if global_batch_size % world_size:
        sharers = "ranks" if replication == 1 else f"groups of {replication} ranks"
        raise UserError(
            f"the global batch of {global_batch_size} samples cannot be divided evenly over {world_size} {sharers}"
        )
    return global_batch_size // world_size


def _loader_options(data: DataConfig, trained_only: bool) -> dict[str, Any]:
    num_workers, found = data.num_workers, end_of_document(data)
    if trained_only and found is None:
        raise UserError("conversations are packed with masks between them: set data.mask_documents: true")
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "worker_init_fn": functools.partial(begin_worker, parent=os.getpid()) if num_workers else None,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": collated(
            collate
            if found is None
            else functools.partial(collate_packed, **found._asdict(), trained_only=trained_only)
        ),
    }


def build_train_loader(
    data: DataConfig,
    *,
    global_batch_size: int,
    vocab_size: int | None = None,
    replication: int = 1,
    stages: int = 1,
    trained_only: bool = False,
) -> TrainLoader:
    """This rank's part of the training data: batches of global_batch_size * replication * stages / WORLD_SIZE samples.

    replication: consecutive ranks that read the same samples. stages: equal parts of the ranks, one after the other, that each read
    all samples. trained_only: only tokens that are marked as trained are labels.
    Raises UserError if the ranks do not divide the batch, ShardError if the data has less than one global batch; its
    iterator, when a token is not below vocab_size.
    """
    batch_size = _rank_batch_size(global_batch_size, replication, stages)
    streams = [CachedStream.of(name, stream, data) for name, stream in data.train_streams().items()]
    dataset = TokenDataset(
        data,
        streams,
        global_batch_size=global_batch_size,
        vocab_size=vocab_size,
        replication=replication,
        stages=stages,
    )
    return TrainLoader(dataset, batch_size=batch_size, drop_last=True, **_loader_options(data, trained_only))


class ValidationDataset(IterableDataset):
    """Each chosen sample once over all ranks, in order; incomplete batches are completed with fillers.

    A rank's batch holds samples of one stream alone, so that its loss is that stream's. These batches are dealt to the ranks in
    order: they are the same on any number of ranks, and all ranks have equally many. Iterable, because Composer requires a
    sampler of its own for map-style datasets.
    """

    def __init__(
        self,
        data: TokenSamples,
        names: Sequence[str],
        global_batch_size: int,
        max_samples: int | None,
        replication: int = 1,
        stages: int = 1,
    ) -> None:
        """names: those of the streams of `data`. replication, stages: as build_train_loader's."""
        self.data = data
        rank, world_size = (number // replication for number in _ranks(stages))
        size = global_batch_size // world_size
        chosen = _evenly_spaced(data.num_samples, max_samples)
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
            yield filler(self.data.seq_len, self.data.beside) if sample_id < 0 else self.data.get_item(int(sample_id))


class ValidationLoader(FailingLoader):
    """Loader of a ValidationDataset: all of it at each `iter`."""

    dataset: ValidationDataset


def _evenly_spaced(samples: int, most: int | None) -> np.ndarray:
    """Ids of at most so many samples, representative of all; None: of all."""
    count = min(samples, most or samples)
    return np.arange(count) * samples // count


def validated_tokens(data: DataConfig, max_samples: int) -> Iterator[np.ndarray] | None:
    """Tokens [seq_len] of each sample of build_validation_loader with `max_samples`, over all ranks; None where these are all."""
    cached = [CachedStream.of(name, stream, data) for name, stream in data.validation_streams().items()]
    samples = TokenSamples(cached, seq_len=data.seq_len)
    if max_samples >= samples.num_samples:
        return None
    chosen = _evenly_spaced(samples.num_samples, max_samples)
    return (np.asarray(samples.get_item(int(one))["tokens"]) for one in chosen)


def _padded(sample_ids: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(sample_ids, (0, -len(sample_ids) % multiple), constant_values=-1)


def build_validation_loader(
    data: DataConfig,
    *,
    global_batch_size: int,
    max_samples: int | None = None,
    vocab_size: int | None = None,
    replication: int = 1,
    stages: int = 1,
    trained_only: bool = False,
) -> ValidationLoader | None:
    """This rank's part of the validation data, not shuffled, or None if the config names none.

    Fillers have sample_id -1 and only ignored labels, so a mean over batches must be weighted by labels, and a rank's
    batch may have none. max_samples: number of samples to take, evenly spaced. replication, stages, trained_only: as
    build_train_loader's.
    Raises UserError if the ranks do not divide the batch.
    """
    streams = data.validation_streams()
    if not streams:
        return None
    batch_size = _rank_batch_size(global_batch_size, replication, stages)
    cached = [CachedStream.of(name, stream, data) for name, stream in streams.items()]
    samples = TokenSamples(cached, seq_len=data.seq_len, vocab_size=vocab_size)
    dataset = ValidationDataset(samples, list(streams), global_batch_size, max_samples, replication, stages)
    return ValidationLoader(dataset, batch_size=batch_size, **_loader_options(data, trained_only))
