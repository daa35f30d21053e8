"""Return of FSDP2 to its idle state after an exception in a forward or backward pass, which torch 2.11 has no function for."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def reset_fsdp(model: nn.Module) -> None:
    """Shards all parameters again and forgets gradients and everything begun. Called by every rank, all of which were interrupted
    in the same pass."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        communication = state._comm_ctx
        communication.post_forward_order.clear()
        communication.all_gather_state = communication.reduce_scatter_state = None
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        group._post_reduce_event = group._all_reduce_state = None
        if group._all_gather_result is not None:  # begun ahead of its layer
            group.wait_for_unshard()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group._to_sharded()
    model.zero_grad(set_to_none=True)
