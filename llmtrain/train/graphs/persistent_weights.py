"""Weights in the form in which layers read them, and sums of their gradients, in memory that stays.

FSDP2 gathers weights for a pass and frees them again, and takes each gradient through a reduction. On one rank, where nothing is
exchanged, these are copies: by count 36 bytes of traffic for each parameter and microbatch. With weights that stay there are 6 for
a cast once a step, and 10 a microbatch for adding a gradient to its sum. Several ranks exchange weights before the first microbatch
of a step and gradients after the last one, each all at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor


class PersistentUnshardedWeights:
    """Copies of a model's parameters, made and read within `read`, which outlive it.

    parameters: as the optimizer has them. leaves: those that layers read in their place, in the format of the computation, whose
    gradients autograd makes. They are the same where FSDP2 does not shard the model. Where several ranks share a parameter, they
    do so along one dimension of the mesh alone, by its rows.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters: list[nn.Parameter] = []
        self.leaves: list[nn.Parameter] = []
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._shared: list[Any] = []  # FSDP2's records of the parameters, in the order of `parameters`
        self._gathered: list[Tensor] = []  # all rows of each leaf, one after the other, filled up for the last ranks
        self._ranks: dist.ProcessGroup | None = None  # None: one rank
        self._parts: list[_Part] = []

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Have the layers read `leaves`. Their gradients are the caller's: FSDP2 reduces those that are still there."""
        if not self._sharded:
            self.parameters = self.leaves = list(self.model.parameters())
            yield
            return
        # Modules that FSDP2 gathers together have one record.
        groups = list(
            {id(group): group for module in self._sharded if (group := group_of(module)) is not None}.values()
        )
        try:
            for module in self._sharded:
                module.set_reshard_after_backward(False, recurse=False)
                module.unshard()
            self._shared = [parameter for group in groups for parameter in group.fsdp_params]
            self.parameters = [parameter.sharded_param for parameter in self._shared]
            self.leaves = [parameter._unsharded_param for parameter in self._shared]
            ranks = groups[0].mesh_info.shard_process_group
            if ranks.size() > 1:
                self._ranks = ranks
                self._gathered = [parameter.all_gather_outputs[0] for parameter in self._shared]
            yield
        finally:
            for group in groups:
                _forget_gathered(group)
            for module in self._sharded:
                module.set_reshard_after_backward(True, recurse=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the leaves up to date with the parameters. Every rank calls it."""
        for module in self._sharded:
            module.reshard()  # validation has left some gathered, and would read them again after the optimizer's next step
        if self._ranks is not None:
            own = [parameter.all_gather_inputs[0] for parameter in self._shared]
            for dtype in dict.fromkeys(part.dtype for part in own):  # NCCL begins those of one format together
                with _at_once(self._ranks, own[0].device):
                    for whole, part in zip(self._gathered, own, strict=True):
                        if part.dtype == dtype:
                            dist.all_gather_into_tensor(whole, part, self._ranks)
        elif self.leaves is not self.parameters:
            torch._foreach_copy_(list(self.leaves), local_parts(self.parameters))

    @property
    def nbytes_beside(self) -> int:
        """Memory that is needed at times beside the leaves and their sums: copies of all weights, which validation gathers, and
        ranks' parts of the sums."""
        if not self._shared:
            return 0
        parts = local_parts(self.parameters) if self._ranks is not None else []
        return sum(t.nbytes for t in (*self.leaves, *parts))

    def zeros(self) -> list[Tensor]:
        """Sums for the leaves' gradients, of the leaves' shapes in the parameters' format; empty for frozen ones."""
        found = []
        for i, (leaf, parameter) in enumerate(zip(self.leaves, self.parameters, strict=True)):
            if not leaf.requires_grad:
                found.append(torch.empty(0, device=leaf.device))
                continue
            numbers = self._gathered[i].numel() if self._ranks is not None else leaf.numel()
            rows = torch.zeros(numbers, dtype=parameter.dtype, device=leaf.device)
            found.append(rows.as_strided(leaf.shape, leaf.stride()))
        return found

    @torch.no_grad()
    def hand_over(self, sums: Sequence[Tensor], indices: Sequence[int]) -> None:
        """Add sums, of `zeros`, to the gradients of the parameters of these indices: their means over the ranks, of each this
        rank's part. Where there is no gradient, a sum becomes it. Every rank calls it, each time with the same arguments."""
        if not self._parts:
            self._parts = [self._part(i, sums[i]) for i in indices]
        if self._ranks is not None:
            with _at_once(self._ranks, self._parts[0].rows.device):
                for i, part in zip(indices, self._parts, strict=True):
                    whole = sums[i].as_strided((self._gathered[i].numel(),), (1,))
                    dist.reduce_scatter_tensor(part.rows, whole, group=self._ranks)
            torch._foreach_div_([part.rows for part in self._parts], self._ranks.size())
        for i, part in zip(indices, self._parts, strict=True):
            parameter = self.parameters[i]
            if parameter.grad is None:
                parameter.grad = part.gradient
            else:
                parameter.grad += part.gradient

    def _part(self, index: int, total: Tensor) -> _Part:
        if not self._shared:
            return _Part(total, total)
        shared, rows, own = self._shared[index], total, total
        if self._ranks is not None:
            rows = total.new_empty(self._gathered[index].numel() // self._ranks.size())
            own = rows.as_strided(shared.sharded_size, shared.contiguous_sharded_stride)
        return _Part(rows, shared.to_sharded_dtensor(own))


@dataclass(frozen=True)
class _Part:
    """This rank's part of a sum. rows: filled up to as many numbers as every rank has. gradient: the same memory as the gradient
    of a parameter."""

    rows: Tensor
    gradient: Tensor


def _at_once(ranks: dist.ProcessGroup, device: torch.device) -> contextlib.AbstractContextManager:
    """Within, exchanges are collected and begun together, where the ranks' library can."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return dist._coalescing_manager(ranks)


def local_parts(tensors: Sequence[Any]) -> list[Tensor]:
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


def sum_by_our_kernel(model: nn.Module) -> None:
    """Have FSDP2 add each further microbatch's gradients to their sums by `accumulate`, where they wait for the last one of a
    step: PyTorch's sum of two formats moves two thirds of the bytes in a second (kernels/accumulate.py). Needs Triton."""
    groups = [group_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            # On the object: FSDP2 has no place for another sum.
            parameter.accumulate_unsharded_grad_if_needed = partial(_add, parameter)


def _add(parameter: Any) -> None:
    """FSDPParam.accumulate_unsharded_grad_if_needed, by our kernel."""
    from llmtrain.kernels.accumulate import accumulate

    total = parameter.unsharded_accumulated_grad
    if total is None or parameter.unsharded_param.grad is None:
        return
    accumulate(*local_parts([total, parameter.unsharded_param.grad]))
    parameter.unsharded_param.grad = None
