"""Worker processes of the loader: they end with their job, and their errors reach it in the words in which they were raised.

A DataLoader raises another error of the same class instead, whose text begins with the worker's traceback. So a worker hands an
error that is all a user needs over as a batch, and the loader raises it.
"""

import functools
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from llmtrain.distributed.processes import serve_parent
from llmtrain.errors import RunError, UserError

_SOCKET = 107 - len("/pymp-00000000/listener-00000000")
"""Most bytes of a temporary folder's path in which multiprocessing's sockets can have an address."""


def begin_worker(worker: int, parent: int) -> None:
    """Called first in a worker process. worker: its number, which DataLoader passes; parent: process id of the job."""
    serve_parent(parent)
    if len(os.fsencode(tempfile.gettempdir())) > _SOCKET:
        tempfile.tempdir = "/tmp"
    # The thread that sends batches would drop one that it cannot send, and the job would wait for it without end.
    Queue._on_queue_feeder_error = staticmethod(_end)  # pyright: ignore[reportAttributeAccessIssue]


def _end(error: Exception, batch: Any) -> None:
    traceback.print_exception(error)
    os._exit(1)


@dataclass(frozen=True)
class Failure:
    """Stand-in for a sample, and for the batch with it."""

    error: Exception


def or_failures(samples: Iterator[Any]) -> Iterator[Any]:
    """The samples. After an expected error of a worker, failures without end: a batch that is not whole may be dropped."""
    try:
        yield from samples
    except (UserError, RunError) as error:
        if get_worker_info() is None:
            raise
        while True:
            yield Failure(error)


def collated(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`collate`, but of samples with a Failure this one."""
    return functools.partial(_collate, collate)


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return next((sample for sample in samples if isinstance(sample, Failure)), None) or collate(samples)


class FailingLoader(DataLoader):
    """Loader of a dataset that gives its samples through `or_failures`, with a collate_fn of `collated`: raises what failed."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if isinstance(batch, Failure):
                raise batch.error
            yield batch
