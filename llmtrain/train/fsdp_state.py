"""State that FSDP2 keeps between the hooks of a microbatch, and has no public name for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def streams_of(model: nn.Module) -> list[torch.cuda.Stream]:
    """The streams that FSDP2 launches on beside the current one; none before the first forward pass."""
    if not isinstance(model, FSDPModule):
        return []
    context = model._get_fsdp_state()._comm_ctx
    return [getattr(context, name) for name in _STREAMS if isinstance(getattr(context, name, None), torch.cuda.Stream)]


def after_failure(model: nn.Module) -> None:
    """Make a model ready for a forward pass again after an exception within a microbatch, whose gradients are lost."""
    if not isinstance(model, FSDPModule):
        return
    root: Any = model._get_fsdp_state()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
    root._comm_ctx.post_forward_order.clear()
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
        group._post_forward_indices.clear()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None
        group._to_sharded()
