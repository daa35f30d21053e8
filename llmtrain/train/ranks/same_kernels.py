"""A check that all ranks run the same kernels: which is the fastest depends on tables that each machine may have of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.models.backends import Chosen


def require_same_kernels(kernels: Iterable[Chosen], world: World) -> None:
    """Raise UserError, on all ranks, if a block's backend is another on some node. Every rank calls this."""
    if world.size == world.local_size:
        return
    own = [(one.block, one.kernel.operation, one.backend) for one in kernels]
    ranks: list[list[tuple[str, str, str | None]]] = [[] for _ in range(world.size)]
    dist.all_gather_object(ranks, own)
    for rank, theirs in enumerate(ranks):
        for (block, operation, expected), (_, _, found) in zip(ranks[0], theirs, strict=True):
            if found != expected:
                raise UserError(
                    f"block {block}: {operation} would run by {expected} on rank 0 and by {found} on rank {rank}, for `auto` "
                    "goes by measurements, which differ between these machines: copy ~/.config/llmtrain/tuning to all of "
                    "them, name one file by LLMTRAIN_TUNING, or name the backend in the YAML"
                )
