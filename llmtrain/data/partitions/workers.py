"""Partitions, made in several processes.

A worker is a fresh Python with one socket to this process, and shares nothing else with it or with other workers, no lock and no
queue: so it may be killed at any moment. The pool of concurrent.futures hangs where a worker is killed within a lock, or before it
has read the settings, which it is sent while it starts; that also has each worker start behind the imports of the one before.
"""

import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.dedup import DocumentHashes, position
from llmtrain.data.partitions.maker import MakeSettings, PartitionMaker, refuse_changed
from llmtrain.data.partitions.prepared_folder import REPORTS
from llmtrain.data.partitions.report import PartitionReport
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.sources.records import BadRecord, SetAside, Slice, read_slice
from llmtrain.data.sources.token_kinds import TokenKind, token_kind
from llmtrain.distributed.processes import end_with_parent
from llmtrain.errors import RunError, is_expected


def hash_documents(maker: PartitionMaker, partition: Partition) -> None:
    """Write the hashes of a partition's documents. maker: the one that will make it.

    Raises PrepareError at what cannot be read, where the settings say so.
    """
    hashes = DocumentHashes()
    for number, part in enumerate(partition.slices):
        mark = hashes.mark()
        try:
            if kind := token_kind(part.file.path, part.file.from_folder):
                _hash_tokens(maker, hashes, number, part, kind)
            else:
                _hash_texts(maker, hashes, number, part)
        except SetAside as error:
            maker.settings.tolerance.refuse(error.bad)
            hashes.back_to(mark)
        refuse_changed(part)
        maker.advance(part.end - part.begin)
    hashes.write(maker.settings.folder / REPORTS, partition.id)


def _hash_texts(maker: PartitionMaker, hashes: DocumentHashes, number: int, part: Slice) -> None:
    document, is_open = 0, False
    for item in read_slice(part, maker.settings.text_key):
        if isinstance(item, BadRecord):
            maker.settings.tolerance.refuse(item)
            continue
        hashes.add_text(item.text)
        is_open = not item.ends
        if is_open:
            continue
        if part.begin and item.name == part.file.name:  # the end of a text that began in another slice
            hashes.end_part(part, position(number, document))
        else:
            hashes.end(position(number, document))
        document += 1
    if is_open:
        hashes.end_part(part, position(number, document))


def _hash_tokens(maker: PartitionMaker, hashes: DocumentHashes, number: int, part: Slice, kind: TokenKind) -> None:
    document = 0
    for item in maker.token_files(part, kind):
        if isinstance(item, BadRecord):
            maker.settings.tolerance.refuse(item)
            continue
        batch, _, _ = item
        for ids in np.split(batch.ids, np.cumsum(batch.tokens)[:-1]) if len(batch.tokens) else ():
            hashes.add_tokens(ids)
            hashes.end(position(number, document))
            document += 1


_REPORT_INTERVAL = 0.1
"""Seconds between two reports of a worker's progress, at least."""


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
    processes = min(workers, len(tasks))
    running: dict[Connection, _Worker] = {}
    todo = iter(enumerate(tasks))
    try:
        for _ in range(processes):
            worker = _Worker(max(1, workers // processes))
            running[worker.connection] = worker
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                worker = running[connection]
                match worker.receive():
                    case _Ask() if not worker.has_settings:
                        worker.send(settings)
                        worker.has_settings = True
                    case _Ask():
                        worker.number, task = next(todo, (-1, None))
                        worker.send(task)
                        if task is None:
                            running.pop(connection).close()
                    case int(nbytes):
                        advance(nbytes)
                    case _Done(report):
                        yield worker.number, report
                    case _Failed(error):
                        raise error
    finally:
        for worker in running.values():
            worker.close(kill=True)


@dataclass(frozen=True)
class _Ask:
    """Message of a worker that waits: first for the settings, then for a task."""


@dataclass(frozen=True)
class _Done:
    report: PartitionReport | None


@dataclass(frozen=True)
class _Failed:
    error: Exception


class _Worker:
    """A process that makes partitions. number: of the task that it has.

    Nothing is sent to it but what it has asked for, so that sending never waits for it to start.
    """

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from llmtrain.data.partitions.workers import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env=os.environ | _environment(threads),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for this process, which ends the worker
            )
        self.connection = Connection(ours.detach())
        self.has_settings, self.number = False, -1

    def receive(self) -> Any:
        """The next message. Raises PrepareError where the process has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise _died() from error

    def send(self, content: Any) -> None:
        """Raises PrepareError where the process has died."""
        try:
            self.connection.send(content)
        except OSError as error:
            raise _died() from error

    def close(self, kill: bool = False) -> None:
        if kill:
            self._process.kill()
        self.connection.close()
        self._process.wait()


def _died() -> PrepareError:
    return PrepareError(
        "a worker process died (out of memory?); try fewer with data.prepare.workers or --workers. What the others "
        "have finished is kept: the same command goes on from there"
    )


def _environment(threads: int) -> dict[str, str]:
    """Environment of a worker: its modules are this process's, its libraries start no threads that they do not need."""
    return {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "RAYON_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def serve(descriptor: int, parent: int) -> None:
    """Make partitions for the process `parent`, which is at the other end of a socket, until there are no more."""
    end_with_parent(parent)
    with Connection(descriptor) as connection:
        try:
            maker = PartitionMaker(_asked(connection), _ProgressReporter(connection))
            while (task := _asked(connection)) is not None:
                report = task.done_by(maker)
                maker.advance(0)
                connection.send(_Done(report))
        except Exception as error:
            connection.send(_Failed(_sendable(error)))


def _asked(connection: Connection) -> Any:
    connection.send(_Ask())
    return connection.recv()


class _ProgressReporter:
    """Callable that sends bytes, added up. A call with 0 sends what is left."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._unreported_bytes, self._reported_at = connection, 0, 0.0

    def __call__(self, nbytes: int) -> None:
        self._unreported_bytes += nbytes
        if nbytes and time.monotonic() - self._reported_at < _REPORT_INTERVAL:
            return
        self._connection.send(self._unreported_bytes)
        self._unreported_bytes, self._reported_at = 0, time.monotonic()


def _sendable(error: Exception) -> Exception:
    """The error, as it is where its text is all that a user needs, and else with its traceback as the text."""
    if is_expected(error) or isinstance(error, OSError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:
            pass
    return RunError("".join(traceback.format_exception(error)).rstrip())


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
