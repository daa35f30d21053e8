"""StreamingDataset loaders whose sample order depends on the seed and the global batch, not on ranks or workers.

With more than one rank the process group must exist before a loader is built. The environment variables RANK,
WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say which rank this is, as torchrun and composer set them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from llmtrain.data.batches import Batch, collate, collate_packed, filler
from llmtrain.data.documents import end_of_document
from llmtrain.data.shards import TOKEN_COLUMNS, ShardError, epoch_samples, read_index, stream_folder
from llmtrain.data.shared_memory import dataset_lock
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig, StreamConfig


class TokenDataset(StreamingDataset):
    """A StreamingDataset of token samples with their ids.

    Samples are {tokens: int [seq_len], sample_id: int, text_bytes: int}. sample_id numbers the samples of all streams in the
    order of the config; it is the same in every epoch and on every rank.
    """

    def __init__(self, *, seq_len: int, vocab_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self._failure: BaseException | None = None
        self.epoch_finished = False
        """Set by TrainLoader after an epoch's last batch."""

    def set_epoch_size(self, size: int) -> None:
        """Draw `size` samples per epoch, from each stream by its proportion (largest remainders rounded up).

        StreamingDataset has an epoch_size too, but needs it before it has read (or downloaded) the number of samples.
        """
        exact = np.array([stream.proportion for stream in self.streams]) * size
        choose = np.floor(exact).astype(np.int64)
        choose[np.argsort(choose - exact, kind="stable")[: size - choose.sum()]] += 1
        for stream, count in zip(self.streams, choose, strict=True):
            stream.choose = int(count)
        self.epoch_size = size
        self.length = size // self._parallel_rank_world.num_ranks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """This worker's samples of the next epoch. Raises ShardError if a shard cannot be read or downloaded.

        StreamingDataset prepares shards in threads; when one fails it only logs that and ends the epoch early.
        """
        yield from super().__iter__()
        if self._failure:
            raise ShardError(str(self._failure)) from self._failure

    def on_exception(self, future: Future) -> None:
        """Callback for the end of a thread of __iter__."""
        error = future.exception()
        if error:
            self._failure = self._failure or error
            self._event.set()

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download and decompress a shard if need be. Raises ShardError if that fails."""
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:  # whatever the remote's client raises
            # Left as PREPARING, other workers and ranks would wait for it for ever. LOCAL makes them look for the
            # file, miss it, and meet the error themselves.
            self._shard_states[shard_id] = _ShardState.LOCAL
            stream = self.streams[self.stream_per_shard[shard_id]]
            file = os.path.join(stream.local, stream.split, self.shards[shard_id].raw_data.basename)
            self._failure = ShardError(f"the shard {file} cannot be had: {type(error).__name__}: {error}")
            if hasattr(self, "_event"):
                self._event.set()  # or this process's other threads would wait for the shard for ever
            raise self._failure from error

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        try:
            record = super().get_item(sample_id, retry)
        except RuntimeError as error:
            raise ShardError(str(self._failure or error)) from error
        tokens = next((record[name] for name in TOKEN_COLUMNS if name in record), None)
        if tokens is None:
            raise ShardError(f"sample {sample_id} has no column 'tokens' (columns: {', '.join(record)})")
        if isinstance(tokens, bytes):
            tokens = np.frombuffer(tokens, np.int64)  # LLM Foundry's older shards
        if tokens.shape != (self.seq_len,):
            raise ShardError(f"sample {sample_id} has {tokens.size} tokens, data.seq_len is {self.seq_len}")
        if self.vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            wrong = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise ShardError(
                f"sample {sample_id} has token {wrong}, but model.vocab_size is {self.vocab_size}: the shards were made "
                "with a larger tokenizer, or are no tokens"
            )
        return {"tokens": tokens, "sample_id": int(sample_id), "text_bytes": int(record.get("text_bytes", -1))}

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Position in the data, as Composer saves it: num_samples of this epoch are done, counted over all ranks.

        StreamingDataset moves to the next epoch only when iterated again, so a checkpoint between two epochs
        (Composer counts 0 samples there) would repeat the order of the one that has just ended.
        """
        state = super().state_dict(num_samples, from_beginning)
        if from_beginning and num_samples == 0 and self.epoch_finished:
            state["epoch"] += 1
        return state


class TrainLoader(DataLoader):
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


def _rank_batch_size(global_batch_size: int) -> int:
    world_size = _ranks()[1]
    if global_batch_size % world_size:
        raise UserError(
            f"the global batch of {global_batch_size} samples cannot be divided evenly over {world_size} ranks"
        )
    return global_batch_size // world_size


def _stream(config: StreamConfig) -> Stream:
    index = read_index(stream_folder(config))
    return Stream(
        local=os.path.expanduser(config.local),
        remote=config.remote,
        split=config.split,
        proportion=config.proportion,
        # A flipped bit in a shard must not become training data.
        validate_hash=index.hash_algorithm if index else None,
    )


def _loader_options(data: DataConfig) -> dict[str, Any]:
    num_workers, eod_id = data.num_workers, end_of_document(data)
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": collate if eod_id is None else functools.partial(collate_packed, eod_id=eod_id),
    }


def build_train_loader(data: DataConfig, *, global_batch_size: int, vocab_size: int | None = None) -> TrainLoader:
    """This rank's part of the training data: batches of global_batch_size / WORLD_SIZE samples.

    Raises UserError if the ranks do not divide the batch, ShardError if the data has less than one global batch; its
    iterator, when a token is not below vocab_size.
    """
    batch_size = _rank_batch_size(global_batch_size)
    streams = list(data.train_streams().values())
    options: dict[str, Any] = {
        "seq_len": data.seq_len,
        "vocab_size": vocab_size,
        "batch_size": batch_size,
        "shuffle": data.shuffle,
        "shuffle_seed": data.shuffle_seed,
        "shuffle_block_size": data.shuffle_block_size,
        "num_canonical_nodes": data.num_canonical_nodes,
        "predownload": data.predownload,
    }
    with dataset_lock():
        dataset = TokenDataset(streams=[_stream(stream) for stream in streams], **options)
        size = epoch_samples(dataset.num_samples, global_batch_size, data.num_canonical_nodes)
        if not size:
            raise ShardError(
                f"the training data has {dataset.num_samples} samples; one epoch needs a multiple of both the global "
                f"batch ({global_batch_size}) and data.num_canonical_nodes ({data.num_canonical_nodes})"
            )
        dataset.set_epoch_size(size)
    return TrainLoader(dataset, batch_size=batch_size, drop_last=True, **_loader_options(data))


class ValidationDataset(IterableDataset):
    """Each chosen sample once over all ranks, in order; the last batches are completed with fillers.

    Global batch b holds the chosen samples b * G ... (b + 1) * G - 1 on any number of ranks; each rank takes a
    contiguous part of it, and all ranks have equally many batches. Iterable, because Composer requires a sampler of its own
    for map-style datasets.
    """

    def __init__(self, data: TokenDataset, global_batch_size: int, max_samples: int | None) -> None:
        self.data = data
        self.rank, world_size = _ranks()
        self.batch_size = global_batch_size // world_size
        self.global_batch_size = global_batch_size
        count = min(data.num_samples, max_samples or data.num_samples)
        # Evenly spaced: representative of all samples.
        self.sample_ids = np.arange(count) * data.num_samples // count
        self.batches = -(-count // global_batch_size)

    def __len__(self) -> int:
        return self.batches * self.batch_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for batch in range(worker, self.batches, workers):
            begin = batch * self.global_batch_size + self.rank * self.batch_size
            for position in range(begin, begin + self.batch_size):
                if position < len(self.sample_ids):
                    yield self.data.get_item(int(self.sample_ids[position]))
                else:
                    yield filler(self.data.seq_len)


def build_validation_loader(
    data: DataConfig, *, global_batch_size: int, max_samples: int | None = None, vocab_size: int | None = None
) -> DataLoader | None:
    """This rank's part of the validation data, not shuffled, or None if the config names none.

    Fillers have sample_id -1 and only ignored labels, so a mean over batches must be weighted by labels, and a rank's
    batch may have none. max_samples: number of samples to take, evenly spaced.
    Raises UserError if the ranks do not divide the batch.
    """
    streams = list(data.validation_streams().values())
    if not streams:
        return None
    batch_size = _rank_batch_size(global_batch_size)
    with dataset_lock():
        samples = TokenDataset(
            seq_len=data.seq_len, vocab_size=vocab_size, streams=[_stream(stream) for stream in streams]
        )
    dataset = ValidationDataset(samples, global_batch_size, max_samples)
    return DataLoader(dataset, batch_size=batch_size, **_loader_options(data))
