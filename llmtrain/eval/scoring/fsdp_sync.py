"""A sharded model gathers its weights anew in every call, which takes all ranks: they must call it equally often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llmtrain.eval.scoring.scorer import reading
from llmtrain.models.cache import Cache
from llmtrain.models.hybrid import HybridLM


@contextmanager
def lockstep(model: HybridLM) -> Iterator[None]:
    """Inside, ranks may call the model as often as they like; those with less work go along until all are done.

    Before every call the ranks tell each other whether they have work left. One that has knows the answer and does not
    wait for it. A rank that fails goes along too, so that the others end, and raises afterwards.
    """
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        yield
        return
    device = model.embed.weight.device
    idle = False

    def announce(module: nn.Module, args: object, kwargs: object) -> None:
        if not idle:
            dist.all_reduce(torch.ones(1, dtype=torch.int32, device=device), op=dist.ReduceOp.MAX)

    hook = model.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
    try:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            idle = True
            _go_along(model, device)
            raise
        idle = True
        _go_along(model, device)
    finally:
        hook.remove()


def _go_along(model: HybridLM, device: torch.device) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    while True:
        busy = torch.zeros(1, dtype=torch.int32, device=device)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        if not busy.item():
            return
        with reading():
            model(token, cache=Cache(model, 1, 1))
