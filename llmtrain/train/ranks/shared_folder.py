"""A check that all nodes see one folder of the run: each rank writes and reads its part of a checkpoint there."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import torch.distributed as dist

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.distributed.world import World

_SECONDS = 30.0
"""A network file system may show a new file to other nodes that late."""


def require_shared(root: Path, world: World, seconds: float = _SECONDS) -> None:
    """Raise CheckpointError, on all ranks, if `root` is another disk on some node. Every rank calls this, first of all."""
    if world.size == world.local_size:
        return
    names = [f".rank0-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, src=0)
    mark = root / names[0]
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
    dist.barrier()
    deadline = time.monotonic() + seconds
    while not (seen := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    answers: list[bool] = [False] * world.size
    dist.all_gather_object(answers, seen)
    if world.is_main:
        mark.unlink()
    if not all(answers):
        apart = [str(rank) for rank, answer in enumerate(answers) if not answer]
        raise CheckpointError(
            f"{root} is not the same folder on every node: rank(s) {', '.join(apart)} do not see what rank 0 writes there. "
            "Put run_dir on a file system that all nodes share; checkpoint.remote does not replace it"
        )
