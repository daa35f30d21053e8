"""The uploads of a training run: done by rank 0, and waited for at its end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch.distributed as dist

from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.save_load import SaveError
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.checkpoint.uploader import Uploader
from llmtrain.distributed.world import World
from llmtrain.errors import Preempted, RunError, UserError
from llmtrain.train.faults.preemption import Preemption

_NO_FAULT = (OSError, UserError, RunError)
_TOGETHER_SECONDS = 30.0
"""Well below the time after which a collective gives up."""


class Uploads:
    """Upload of the run's checkpoints to `checkpoint.remote`, if there is one, by rank 0. Never fails training.

    Every rank makes one, and uses it as a context manager. After the block call `finish`, once no other rank waits for this
    one. An exception ends the upload: for Preempted at the end of the time limit; for SaveError (a full disk), which every
    rank raises, and for any error of a lone process that is no fault of the program, when it is finished; else at once.
    """

    def __init__(self, address: str | None, root: Path, retention: Retention, world: World, preemption: Preemption):
        self._preemption, self._world, self._remote = preemption, world, address is not None
        self._uploader = Uploader(open_store(address), root, retention) if address and world.is_main else None

    def finish(self) -> None:
        """Wait until everything is uploaded, or has failed once more, which is logged."""
        self._close(None)

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        if issubclass(kind, Preempted):
            self._close(self._preemption.seconds_left)
        elif issubclass(kind, SaveError) or (self._world.size == 1 and issubclass(kind, _NO_FAULT)):
            self._wait_together()
            self._close(None)
        else:
            self._close(0.0)

    def _wait_together(self) -> None:
        """Wait on every rank until rank 0 is done: a rank that ends makes the launcher end all."""
        done = self._world.size == 1 or not self._remote
        with contextlib.suppress(RuntimeError):  # a rank is gone after all
            while not done:
                answer = [self._uploader is None or self._uploader.wait(_TOGETHER_SECONDS)]
                dist.broadcast_object_list(answer, src=0)
                done = answer[0]

    def _close(self, seconds: float | None) -> None:
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.close(seconds)
