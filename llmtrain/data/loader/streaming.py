"""A StreamingDataset of token samples: checked shards, an order of its own where one is given, errors that end the run."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from filelock import FileLock
from streaming import StreamingDataset
from streaming.base import dataset as dataset_module
from streaming.base.constant import TICK
from streaming.base.dataset import _ShardState
from streaming.base.shared.prefix import get_shm_prefix

from llmtrain.config.regular_file import open_regular
from llmtrain.data.loader.order import SampleOrder
from llmtrain.data.loader.shared_memory import require_room
from llmtrain.data.loader.worker_errors import or_failures
from llmtrain.data.loader.worker_samples import Reader, WorkerSamples
from llmtrain.data.shards.checks import cache_fault
from llmtrain.data.shards.index import TOKEN_COLUMNS, ShardError, verify_shard
from llmtrain.errors import UserError
from llmtrain.logs import run_log

_ATTEMPTS = 8
"""To find a shard that was there a moment ago."""


class ShardSpanner:
    """Look-up of the shard that holds a sample, and of the sample's number there. In the place of StreamingDataset's Spanner, which
    lists the shard of each sample: 8 GB for 10⁹."""

    def __init__(self, shard_sizes: np.ndarray) -> None:
        self._ends = np.cumsum(shard_sizes)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if not 0 <= index < (self._ends[-1] if len(self._ends) else 0):
            raise IndexError(f"there is no sample {index}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, int(index) - (int(self._ends[shard - 1]) if shard else 0)


def _shared_prefix(streams_local: list[str], streams_remote: list[str | None], world: Any) -> tuple[int, Any]:
    """StreamingDataset's shared memory, without its refusal of a folder that another job caches a remote in."""
    return get_shm_prefix(streams_local, [None] * len(streams_remote), world)


class TokenDataset(StreamingDataset):
    """A StreamingDataset of token samples with their ids.

    A shard is compared with its index when one of the rank's processes first reads it: size, number of samples, hash.

    Samples are {tokens: int [seq_len], sample_id: int, text_bytes: int}. sample_id numbers the samples of all streams in the
    order of the config; it is the same in every epoch and on every rank.
    """

    def __init__(
        self,
        *,
        seq_len: int,
        vocab_size: int | None = None,
        order: Callable[[TokenDataset], SampleOrder] | None = None,
        order_name: str = "streaming",
        cache_limit: int | None = None,
        readers: int = 1,
        **kwargs: Any,
    ) -> None:
        """order: makes the order of samples once the shards are known; None: StreamingDataset's. order_name: what a position
        calls it. cache_limit: bytes that the folders may hold. readers: processes of this node that read from them. Raises
        UserError where they have no room for what these read."""
        self._cache_filelocks: dict[int, FileLock] = {}
        with (
            mock.patch.object(dataset_module, "Spanner", ShardSpanner),
            mock.patch.object(dataset_module, "get_shm_prefix", _shared_prefix),
        ):
            super().__init__(**kwargs)
        self.cache_limit = cache_limit
        if cache_limit is not None:
            self._require_room_in_cache(cache_limit, readers)
        self._make_order = order
        self.order_name = order_name
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self._failure: BaseException | None = None
        self._verified = torch.zeros(self.num_shards, dtype=torch.uint8).share_memory_()  # with the workers
        self._readable: set[int] = set()
        self.epoch_finished = False
        """Set by TrainLoader after an epoch's last batch."""

    def _require_room_in_cache(self, limit: int, readers: int) -> None:
        indexes = sum(stream.get_index_size() for stream in self.streams)
        largest = max(shard.get_max_size() for shard in self.shards)
        if reason := cache_fault(limit, indexes, largest, readers):
            raise UserError(f"data.cache_limit = {limit}: {reason}")

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

    def __iter__(self) -> Iterator[Any]:
        """This worker's samples of the next epoch, through `or_failures`. Raises ShardError for a shard that cannot be had."""
        yield from or_failures(self._samples())

    def _samples(self) -> Iterator[dict[str, Any]]:
        """StreamingDataset prepares shards in threads; when one fails it only logs that and ends the epoch early."""
        yield from super().__iter__()
        if self._failure:
            raise ShardError(str(self._failure)) from self._failure

    @functools.cached_property
    def order(self) -> SampleOrder | None:
        return self._make_order(self) if self._make_order else None

    def _ready_thread(self, it: Any) -> None:
        """Count the samples whose shards have been fetched, ahead of those that are read. it: StreamingDataset's state of an epoch.

        In StreamingDataset's own, a shard that is removed again before this thread looks (where the cache has no room for all that
        is fetched ahead) is waited for for ever. Here it counts as fetched: who reads it fetches it anew.
        """
        while not (it.should_exit() or it.ready_index == it.total or self._event.is_set()):
            sample_id = it.sample_ids[it.ready_index]
            if self.predownload is not None and it.ready_index - it.yield_index > self.predownload:
                time.sleep(TICK)
                continue
            if sample_id != -1:
                shard_id, _ = self.spanner[sample_id]
                if self._shard_states[shard_id] == _ShardState.REMOTE:
                    self.prepare_shard(shard_id, blocking=False)
                while self._shard_states[shard_id] == _ShardState.PREPARING and not self._event.is_set():
                    time.sleep(TICK)
            it.ready_index += 1
        it.on_exit()

    def shard_sizes(self) -> list[np.ndarray]:
        """Samples of each shard, by stream."""
        return np.split(self.samples_per_shard, self.shard_offset_per_stream[1:])

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Any:
        """This worker's sample ids for the rest of an epoch."""
        if self.order is None:
            return super()._get_work(epoch, sample_in_epoch)
        # The node's first process has by now counted the epoch up. Without this wait (StreamingDataset's order has one) a process
        # that finds nothing left of the epoch would come to the next one before that, and take it for the same again.
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        world = self._parallel_worker_world
        reader = Reader(world.rank, world.num_ranks, world.worker_of_rank, world.workers_per_rank)
        begin = epoch * self.epoch_size
        return WorkerSamples(self.order, reader, begin=begin, done=sample_in_epoch, size=self.epoch_size)

    def _share_work(self, sample_ids: np.ndarray) -> Any:
        """Put the list of the epoch's samples into shared memory. Raises RunError if it has no room."""
        require_room(sample_ids.nbytes)
        return super()._share_work(sample_ids)

    def on_exception(self, future: Future) -> None:
        """Callback for the end of a thread of __iter__."""
        error = future.exception()
        if error:
            self._failure = self._failure or error
            self._event.set()

    @functools.cached_property
    def _kept_bytes(self) -> np.ndarray:
        """Bytes of each shard that stay in its folder."""
        sizes = [
            np.asarray(one.index.shards.raw_bytes) + np.asarray(one.index.shards.zip_bytes) * bool(one.safe_keep_zip)  # pyright: ignore[reportAttributeAccessIssue]
            for one in self.streams
        ]
        return np.concatenate(sizes)

    @property
    def _cache_filelock(self) -> FileLock:
        """This thread's lock of the cache. StreamingDataset makes one at each call, and would keep the last one of all threads:
        none could tell whether it still holds its own."""
        return self._cache_filelocks[threading.get_ident()]

    @_cache_filelock.setter
    def _cache_filelock(self, lock: FileLock) -> None:
        self._cache_filelocks[threading.get_ident()] = lock

    @property
    def cache_usage(self) -> int:
        """Bytes of indexes and shards in the folders, of those that this job knows of. Counted where it is asked for:
        StreamingDataset's running sum goes wrong where another job fetches or removes a shard."""
        here = self._shard_states.numpy() == _ShardState.LOCAL
        return int(self._kept_bytes[here].sum()) + sum(stream.get_index_size() for stream in self.streams)

    @cache_usage.setter
    def cache_usage(self, cache_usage: int) -> None:
        pass

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download and decompress a shard if need be. Raises ShardError if that fails, but in the threads of __iter__ (blocking
        false): there it sets the event by which both end, and __iter__ raises it. A thread that raised would not be counted as
        ended, and StreamingDataset would wait for it for ever where both did."""
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:  # whatever the remote's client raises
            # Left as PREPARING, other workers and ranks would wait for it for ever. LOCAL makes them look for the
            # file, miss it, and meet the error themselves.
            self._shard_states[shard_id] = _ShardState.LOCAL
            if self._cache_filelock.is_locked:  # StreamingDataset leaves it so where an eviction fails
                self._cache_filelock.release(force=True)
            reason = error if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
            failure = ShardError(f"{self._named(shard_id)} cannot be had: {reason}")
            self._failure = failure
            if hasattr(self, "_event"):
                self._event.set()  # or this process's other threads would wait for the shard for ever
            if blocking:
                raise failure from error
            failure.__cause__ = error

    def _verify(self, shard_id: int) -> None:
        """Compare a shard with its index, unless another process of this rank did. One that is damaged is made again where it
        came from somewhere. Raises ShardError."""
        if self._verified[shard_id]:
            return
        stream, shard = self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]
        file = stream.folder / shard.raw_data.basename
        damage = self._damage(shard_id, file, stream.validate_hash)
        packed = shard.zip_data is not None and (stream.folder / shard.zip_data.basename).is_file()
        if damage and (stream.remote or packed):
            run_log.warning(f"WARNING: {self._named(shard_id)} is not what its index says: {damage}; it is made again")
            file.unlink(missing_ok=True)
            damage = self._damage(shard_id, file, stream.validate_hash)
        if damage:
            raise ShardError(
                f"{self._named(shard_id)} is not what its index says: {damage}; copy it anew from its source, or make it again by "
                "`llmtrain prepare` with --overwrite, unless index.json is what was changed (`llmtrain data verify "
                f"{stream.local}` reads every shard)"
            )
        self._verified[shard_id] = 1

    def _named(self, shard_id: int) -> str:
        stream = self.streams[self.stream_per_shard[shard_id]]
        of = f" of the stream '{stream.name}'" if stream.name else ""
        return f"the shard {stream.folder / self.shards[shard_id].raw_data.basename}{of}"

    def _damage(self, shard_id: int, file: Path, algorithm: str | None) -> str | None:
        """Difference between a shard and its index, as a sentence fragment; None if there is none.

        Raises ShardError if the shard cannot be had."""
        shard = self.shards[shard_id]
        entry = {"samples": shard.samples, "raw_data": vars(shard.raw_data)}
        reason = ""
        for _ in range(_ATTEMPTS):
            self.prepare_shard(shard_id)
            try:
                with open_regular(file) as opened:
                    return verify_shard(opened, entry, algorithm)
            except FileNotFoundError as error:
                # Evicted again, or another thread failed to prepare it: then the next attempt meets that error itself.
                reason = error.strerror
            except OSError as error:
                return f"it cannot be read: {error.strerror or error}"
        return f"it cannot be read: {reason}"

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        try:
            shard_id, _ = self.spanner[sample_id]
            if shard_id not in self._readable:
                self._verify(shard_id)
                self._readable.add(shard_id)
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
        return state | {"order": self.order_name}
