"""The uploads of a training run: done by rank 0, and waited for at its end."""

from __future__ import annotations

from pathlib import Path

from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.checkpoint.uploader import Uploader
from llmtrain.distributed.world import World
from llmtrain.errors import Preempted
from llmtrain.train.preemption import Preemption


class Uploads:
    """Upload of the run's checkpoints to `checkpoint.remote`, if there is one, by rank 0. Never fails training.

    Every rank makes one, and uses it as a context manager: an exception ends the upload, at once or, for Preempted, at the
    end of the time limit. After the block call `finish`, once no other rank waits for this one.
    """

    def __init__(self, address: str | None, root: Path, retention: Retention, world: World, preemption: Preemption):
        self._preemption = preemption
        self._uploader = Uploader(open_store(address), root, retention) if address and world.is_main else None

    def finish(self) -> None:
        """Wait until everything is uploaded, or has failed once more, which is logged."""
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
