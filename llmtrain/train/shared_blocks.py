"""Shared blocks under FSDP2: gathered when the first layer that uses one begins, reduced when its backward pass is done.

FSDP2's own hooks do not fit them: they stand in the middle of a compiled layer, whose graph they would break, and a block that is
used nine times in a forward pass would be reduced after each. As a part of the root's group they would be gathered before the first
layer and reduced after it, where nothing is computed beside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from llmtrain.models.hybrid import HybridLM


def shard_shared_blocks(model: HybridLM, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Give every copy of a shared block a group of its own, after the layers have theirs. It stays gathered after the forward pass,
    as the root does. With one rank there is nothing to gain."""
    if mesh.size(-1) == 1:
        return
    feeds = model.shared_of_layers()
    for shared in dict.fromkeys(model.shared_uses()):  # what no layer uses stays with the root
        fully_shard(shared, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        assert isinstance(shared, FSDPModule)
        state: Any = shared._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        _follow(model.blocks[feeds.index(shared)], state)


def _follow(layer: nn.Module, state: Any) -> None:
    """Gather a shared block before the forward pass of the first layer that uses it, and reduce it after this layer's backward."""

    def reduce(gradient: Tensor) -> None:
        state._fsdp_param_group.post_backward()

    def gather(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        group = state._fsdp_param_group
        if group is None:
            return
        with group.use_training_state(TrainingState.FORWARD):  # else nothing would be computed meanwhile
            group.unshard(group.unshard_async_op)
            group.wait_for_unshard()
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(reduce)

    layer.register_forward_pre_hook(gather)
