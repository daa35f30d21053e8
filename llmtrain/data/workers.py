"""Partitions, made in several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.hash_documents import hash_documents
from llmtrain.data.partition_maker import MakeSettings, PartitionMaker
from llmtrain.data.partition_report import PartitionReport
from llmtrain.data.partitions import Partition
from llmtrain.data.source_files import PrepareError
from llmtrain.distributed.processes import end_with_parent

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Task:
    """A partition to make; see PartitionMaker. only_hashes: to hash the documents of, instead."""

    partition: Partition
    limit: int | None
    keeps_text: bool
    duplicates: NDArray[np.int64] | None = None
    only_hashes: bool = False

    def done_by(self, maker: PartitionMaker) -> PartitionReport | None:
        """The report of the partition; None for `only_hashes`."""
        if self.only_hashes:
            hash_documents(maker, self.partition)
            return None
        return maker(self.partition, self.limit, self.keeps_text, self.duplicates)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Stopped(Exception):
    """Another process failed."""


_maker: PartitionMaker | None = None


def _start_worker(settings: MakeSettings, threads: int, done: Any, stop: Any, parent: int) -> None:
    global _maker
    end_with_parent(parent=parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C stops it through `stop`
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)

    def advance(nbytes: int) -> None:
        if stop.is_set():
            raise _Stopped
        with done.get_lock():
            done.value += nbytes

    _maker = PartitionMaker(settings, advance)


def _make(task: Task) -> PartitionReport | None:
    assert _maker is not None
    return task.done_by(_maker)


def make_partitions(
    tasks: Sequence[Task], settings: MakeSettings, workers: int, advance: Callable[[int], None]
) -> Generator[tuple[int, PartitionReport | None]]:
    """Make partitions in up to `workers` processes. Yields (number of the task, report) as they are finished.

    With fewer tasks than workers, each process tokenises in several threads. advance: called with the stored bytes read.
    A caller that stops early ends the processes. Raises PrepareError of a partition, and where a process is killed.
    """
    if len(tasks) == 1 or workers == 1:
        with _tokenizer_threads(workers > 1):
            maker = PartitionMaker(settings, advance)
            for number, task in enumerate(tasks):
                yield number, task.done_by(maker)
        return
    if not tasks:
        return
    processes = min(workers, len(tasks))
    # Not fork: the parent may hold threads (tokenizers, CUDA).
    context = get_context("spawn")
    done, stop = context.Value("q", 0), context.Event()
    start = (settings, max(1, workers // processes), done, stop, os.getpid())
    with ProcessPoolExecutor(processes, context, _start_worker, start) as pool, _stopping(stop):
        todo = iter(enumerate(tasks))
        running: dict[Future[PartitionReport | None], int] = {}
        told = 0
        try:
            while True:
                while len(running) < processes and (following := next(todo, None)):
                    running[pool.submit(_make, following[1])] = following[0]
                if not running:
                    return
                finished, _ = wait(running, _POLL_SECONDS, FIRST_COMPLETED)
                advance(done.value - told)
                told = done.value
                for future in sorted(finished, key=running.__getitem__):
                    yield running.pop(future), future.result()
        except BrokenProcessPool as error:
            raise PrepareError(
                "a worker process died (out of memory?); try fewer with data.prepare.workers or --workers. What the others "
                "have finished is kept: the same command goes on from there"
            ) from error


@contextmanager
def _stopping(stop: Any) -> Iterator[None]:
    """Tell the processes to stop, however the block ends."""
    try:
        yield
    finally:
        stop.set()


@contextmanager
def _tokenizer_threads(several: bool) -> Iterator[None]:
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if several else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
