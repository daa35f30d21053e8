"""Uploading beside training: which rank does it, and when it is waited for."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch.distributed as dist

from llmtrain.checkpoint.remote.bucket import open_bucket
from llmtrain.checkpoint.remote.uploader import Answerer, Uploader
from llmtrain.checkpoint.rotation import Keep
from llmtrain.train.distributed import World
from llmtrain.train.preemption import Preempted, Preemption


class Uploads:
    """Brings the run's checkpoints to `checkpoint.remote`, if there is one: rank 0 does, and where a node has a disk of its
    own, its first rank sends what rank 0 cannot. Made by every rank; never fails training.

    As a context manager it ends early with an exception: with Preempted when the time to save is over, with others at
    once. After the block call `finish`, once nobody waits for this rank any more.
    """

    def __init__(self, address: str | None, root: Path, keep: Keep, world: World, preemption: Preemption):
        self._preemption = preemption
        self._worker: Uploader | Answerer | None = None
        if address is None:
            return
        everywhere, here = _same_disk(root, world)
        if world.is_main:
            self._worker = Uploader(open_bucket(address), root, keep, several_nodes=not everywhere)
        elif world.local_rank == 0 and not here:
            self._worker = Answerer(open_bucket(address), root)

    def finish(self) -> None:
        """Waits until everything has arrived, or has failed once more, which is told."""
        self._close(None)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._close(self._preemption.seconds_left if issubclass(kind, Preempted) else 0.0)

    def _close(self, seconds: float | None) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close(seconds)


def _same_disk(root: Path, world: World) -> tuple[bool, bool]:
    """Whether every rank sees rank 0's folder of checkpoints, and whether this one does. Called by every rank."""
    if world.size == world.local_size:
        return True, True
    names = [f".rank0-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, src=0)
    mark = root / names[0]
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    seen: list[bool] = [False] * world.size
    dist.all_gather_object(seen, mark.exists())
    if world.is_main:
        mark.unlink()
    return all(seen), seen[world.rank]
