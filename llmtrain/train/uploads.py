"""Uploading beside training: which rank does it, and when it is waited for."""

from __future__ import annotations

from pathlib import Path

from llmtrain.checkpoint.remote.bucket import open_bucket
from llmtrain.checkpoint.remote.uploader import Uploader
from llmtrain.checkpoint.rotation import Keep
from llmtrain.distributed.world import World
from llmtrain.train.preemption import Preempted, Preemption


class Uploads:
    """Rank 0 brings the run's checkpoints to `checkpoint.remote`, if there is one. Made by every rank; never fails training.

    As a context manager it ends early with an exception: with Preempted when the time to save is over, with others at
    once. After the block call `finish`, once nobody waits for this rank any more.
    """

    def __init__(self, address: str | None, root: Path, keep: Keep, world: World, preemption: Preemption):
        self._preemption = preemption
        self._uploader = Uploader(open_bucket(address), root, keep) if address and world.is_main else None

    def finish(self) -> None:
        """Waits until everything has arrived, or has failed once more, which is told."""
        self._close(None)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._close(self._preemption.seconds_left if issubclass(kind, Preempted) else 0.0)

    def _close(self, seconds: float | None) -> None:
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close(seconds)
