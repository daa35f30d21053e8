"""Norm of sharded gradients over all ranks, also where ranks divide the model and several hold the same parameters."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import clean_name
from llmtrain.models.slices import Box, boxes, local_of
from llmtrain.models.tensor_parallel import TensorRanks, slices_of


class SharedGradients:
    """The gradients of a model after FSDP2 has reduced them, each rank's of its shard of its part.

    ranks: tensor-parallel ones, where there are any. Every rank of the run calls the methods, in the same order.
    """

    def __init__(self, model: HybridLM, ranks: TensorRanks | None):
        self.ranks = ranks
        slices = slices_of(model)
        self.parameters = [
            (parameter, slices.get(clean_name(name)))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def stages_of(self, parameter: nn.Parameter) -> int:
        """Stages of a pipeline that hold a parameter."""
        return 1

    @cached_property
    def _parts(self) -> list[tuple[nn.Parameter, list[Box], int]]:
        """Every parameter, the parts of it that this rank has, which take the host longer to find than a step has, and the stages
        that have the same."""
        copies = 1 if self.ranks is None else self.ranks.size
        return [(one, boxes(one, slices, copies), self.stages_of(one)) for one, slices in self.parameters]

    def _held(self) -> Iterator[tuple[Tensor, int, int]]:
        """Every part of a gradient that this rank has, and how many ranks of its tensor-parallel group and how many stages have the
        same."""
        for parameter, parts, stages in self._parts:
            if parameter.grad is not None:
                local = local_of(parameter.grad)
                for box in parts:
                    yield local[box.at], box.copies, stages

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients of what several ranks of a group hold: each has what its own tokens, or its own heads, gave.

        One message: every rank writes its summands in the place of the sharers that it belongs to, among zeros.
        """
        shared = [(local, copies) for local, copies, _ in self._held() if copies > 1]
        if self.ranks is None or not shared:
            return
        sizes = [self.ranks.size // copies * local.numel() for local, copies in shared]
        message = shared[0][0].new_zeros(sum(sizes))
        own = [
            place.view(-1, *local.shape)[self.ranks.rank // copies]
            for place, (local, copies) in zip(message.split(sizes), shared, strict=True)
        ]
        torch._foreach_copy_(own, [local for local, _ in shared])
        dist.all_reduce(message, group=dist.distributed_c10d._resolve_process_group(self.ranks.group))
        torch._foreach_copy_([local for local, _ in shared], own)

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients, which `add_up` has summed, down to this norm over all parameters; return their norm before.

        As torch.nn.utils.clip_grad_norm_ for a model in one piece.
        """
        found = list(self._held())
        device = self.parameters[0][0].device
        squares = torch.zeros((), device=device)
        if found:
            norms = torch.stack(torch._foreach_norm([local for local, *_ in found]))
            copies = torch.tensor([copies * stages for _, copies, stages in found], dtype=norms.dtype).to(device)
            squares = (norms.square() / copies).sum()
        return _clip([local for local, *_ in found], squares, self.parameters[0][0], max_norm)


@torch.no_grad()
def clip_shards(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Clip the gradients of parameters that FSDP2 alone has sharded, and return their norm over all ranks. At least one parameter,
    all with gradients. As operators on DTensors, for some hundred parameters, it takes the host five times as long."""
    gradients = [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    return _clip(gradients, squares, parameters[0], max_norm)


def _clip(gradients: list[Tensor], squares: Tensor, parameter: nn.Parameter, max_norm: float) -> Tensor:
    """Scale local gradients to a norm of at most max_norm over all ranks, and return the norm before. squares: the sum of this
    rank's squares. parameter: any of those that have the gradients."""
    dist.all_reduce(squares)
    norm = (squares / _replicas(parameter)).sqrt()
    if gradients and math.isfinite(max_norm):
        # A norm of NaN leaves them as they are, so that the parameters with NaN can be named.
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).nan_to_num(nan=1.0).clamp(max=1.0))
    return norm


def _replicas(parameter: nn.Parameter) -> int:
    """Ranks that hold the same shard, of hybrid sharding."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return mesh.size(0) if mesh.ndim == 2 else 1
