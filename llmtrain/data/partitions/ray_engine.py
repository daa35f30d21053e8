"""Partitions, made on a Ray cluster: `engine: ray`.

Every node needs this package, the sources, and the folder that is written, or a store in its place. Ray is imported here alone.
"""

import functools
import importlib
import os
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any

from llmtrain.config.addresses import is_remote
from llmtrain.data.partitions.dedup import has_hashes
from llmtrain.data.partitions.maker import MakeSettings, PartitionMaker
from llmtrain.data.partitions.prepared_folder import REPORTS, SPLITS
from llmtrain.data.partitions.report import PartitionReport, read_report
from llmtrain.data.partitions.workers import Task
from llmtrain.data.sources.files import PrepareError
from llmtrain.errors import first_line, is_expected

_RETRIES = 3
"""How often a partition is begun again elsewhere when the process or the node that makes it dies."""


def make_partitions_on_ray(
    tasks: Sequence[Task], settings: MakeSettings, workers: int | None, advance: Callable[[int], None]
) -> Generator[tuple[int, PartitionReport | None]]:
    """Make partitions on the Ray cluster of RAY_ADDRESS, or of this machine: up to `workers` at a time, by default one for each of
    its CPUs. Yields (number of the task, report) as they are finished.

    advance: called with the stored bytes of a partition once it is made. A caller that stops early cancels the others. Raises
    PrepareError of a partition, and where there is no cluster, or where its nodes do not share the folder.
    """
    if not tasks:
        return
    ray = _connected()
    most = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
    make = ray.remote(num_cpus=1, max_retries=_RETRIES)(_make)
    shared = ray.put(settings)
    todo = iter(enumerate(tasks))
    running: dict[Any, int] = {}
    try:
        while True:
            while len(running) < most and (following := next(todo, None)):
                running[make.remote(shared, following[1])] = following[0]
            if not running:
                return
            [finished], _ = ray.wait(list(running))
            number = running.pop(finished)
            report = _result(ray, finished)
            _require_here(tasks[number], report, settings)
            advance(tasks[number].partition.stored_bytes)
            yield number, report
    finally:
        for one in running:
            ray.cancel(one, force=True)


def _connected() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise PrepareError("engine: ray is not installed (`pip install 'llmtrain[ray]'`)") from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PrepareError(
                f"engine: found no Ray cluster ({first_line(error)}); start one with `ray start --head`, or name "
                "it in RAY_ADDRESS; on one machine `engine: processes` needs none"
            ) from error
    return ray


def _result(ray: Any, finished: Any) -> PartitionReport | None:
    try:
        return ray.get(finished)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception) and (is_expected(error.cause) or isinstance(error.cause, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        raise PrepareError(
            f"a partition was begun {_RETRIES + 1} times, and the Ray worker died each time (out of memory?): {error}\n"
            "What the others have finished is kept: the same command goes on from there"
        ) from error


def _require_here(task: Task, report: PartitionReport | None, settings: MakeSettings) -> None:
    """Check that what another node has written is seen here."""
    if settings.store:
        return
    there = has_hashes(settings.folder / REPORTS, task.partition)
    if not (there if task.only_hashes else report and read_report(settings.folder, report.id)):
        raise PrepareError(
            f"a node of the Ray cluster made a partition in {settings.folder}, which is not the folder of that name on this "
            "machine; give --out a folder that all nodes share, or s3://BUCKET/FOLDER"
        )


def _make(settings: MakeSettings, task: Task) -> PartitionReport | None:
    """Make a partition on a node of the cluster."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    for part in task.partition.slices:
        if not is_remote(part.file.path) and not os.path.exists(part.file.path):
            raise PrepareError(
                f"{part.file.path} is not on {socket.gethostname()}, a node of the Ray cluster; the sources must be on all nodes, "
                "or in a store"
            )
    for name in (*SPLITS, REPORTS):
        (settings.folder / name).mkdir(parents=True, exist_ok=True)
    return task.done_by(_maker(settings))


@functools.lru_cache(maxsize=1)
def _maker(settings: MakeSettings) -> PartitionMaker:
    return PartitionMaker(settings, lambda nbytes: None)
