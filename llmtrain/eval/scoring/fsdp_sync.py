"""Forward passes of a sharded model on unequal inputs.

FSDP all-gathers the weights in every forward pass, so all ranks must call the model equally often.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llmtrain.eval.scoring.scorer import inference
from llmtrain.models.causal_lm import CausalLM


@contextmanager
def join_uneven_calls(model: CausalLM) -> Iterator[None]:
    """Context in which each rank may call the model as often as it needs, as torch's `Join` does for DDP.

    Before every call, ranks with work left and ranks without exchange a flag (all-reduce). A rank that has finished answers
    the calls of the others with forward passes over one token until none has work left. The rank that calls does not wait
    for the flag's value. A rank that raises also joins until the others have finished, and raises afterwards.
    """
    if not isinstance(model, FSDPModule) or dist.get_world_size() == 1:
        yield
        return
    device = model.device
    finished = False

    def announce(module: nn.Module, args: object, kwargs: object) -> None:
        if not finished:
            dist.all_reduce(torch.ones(1, dtype=torch.int32, device=device), op=dist.ReduceOp.MAX)

    hook = model.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
    try:
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            finished = True
            _shadow_calls(model, device)
            raise
        finished = True
        _shadow_calls(model, device)
    finally:
        hook.remove()


def _shadow_calls(model: CausalLM, device: torch.device) -> None:
    """Take part in the collectives of other ranks' forward passes until no rank has work left."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    while True:
        busy = torch.zeros(1, dtype=torch.int32, device=device)
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        if not busy.item():
            return
        with inference():
            model.next_logits(token, model.empty_cache(1, 1))
