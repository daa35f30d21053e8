"""Weights in the form in which layers read them, in memory that stays.

FSDP2 gathers them for a pass and frees them again, and takes each gradient through a reduction. On one rank, where nothing is
exchanged, these are copies: by count 36 bytes of traffic for each parameter and microbatch. With weights that stay there are 6 for
a cast once a step, and 10 a microbatch for adding a gradient to its sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor


class HeldWeights:
    """Copies of a model's parameters, made and read within `read`, which outlive it. For one rank alone.

    parameters: as the optimizer has them. leaves: those that layers read in their place, in the format of the computation, whose
    gradients autograd makes. They are the same where FSDP2 does not shard the model.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters: list[nn.Parameter] = []
        self.leaves: list[nn.Parameter] = []

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Have the layers read `leaves`. Their gradients are the caller's: FSDP2 reduces those that are still there."""
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if not sharded:
            self.parameters = self.leaves = list(self.model.parameters())
            yield
            return
        # Modules that FSDP2 gathers together have one record.
        groups = list({id(group): group for module in sharded if (group := group_of(module)) is not None}.values())
        try:
            for module in sharded:
                module.set_reshard_after_backward(False, recurse=False)
                module.unshard()
            held = [parameter for group in groups for parameter in group.fsdp_params]
            self.parameters = [parameter.sharded_param for parameter in held]
            self.leaves = [parameter._unsharded_param for parameter in held]
            yield
        finally:
            for group in groups:
                _forget_gathered(group)
            for module in sharded:
                module.set_reshard_after_backward(True, recurse=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the leaves up to date with the parameters."""
        if self.leaves is not self.parameters:
            torch._foreach_copy_(list(self.leaves), local_parts(self.parameters))


def local_parts(tensors: list[Any]) -> list[Tensor]:
    """This rank's part of each."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def group_of(module: FSDPModule) -> Any:
    """FSDP2's record of the parameters that it gathers together, for which it has no public name; None: it has none."""
    return module._get_fsdp_state()._fsdp_param_group


def _forget_gathered(group: Any) -> None:
    """Has FSDP2 hold its shards alone, as after a backward pass, but without freeing what was gathered: it makes its next copies
    elsewhere."""
    for parameter in group.fsdp_params:
        parameter.all_gather_outputs = []
        parameter._unsharded_inner_tensors = []
        if hasattr(parameter, "_unsharded_param"):
            del parameter._unsharded_param
        parameter._setattr_on_modules(parameter.sharded_param)
        parameter.sharded_state = ShardedState.SHARDED
    group._sharded_state = ShardedState.SHARDED
    group._training_state = TrainingState.IDLE
