"""Losses that arise inside a layer, and sums over the microbatches of a step, both of which belong to the whole step.

Both act in the backward pass, which every microbatch of training has once: layers whose activations are computed again count
nothing twice, and validation and decoding count nothing. All numbers are tensors on the device, which CUDA graphs read and write.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttachedLosses:
    """weight: of the microbatch in the step's loss, an fp32 scalar. terms: by name, the sum over layers and microbatches of each
    loss times its microbatch's weight; the mean over the ranks is the step's.

    `weigh` sets the weight as the backward pass begins: the gradient that arrives at the microbatch's loss. Where a backward pass
    begins behind that loss, at a stage of a pipeline, the weight is to be set before it.
    """

    weight: Tensor
    terms: dict[str, Tensor]

    @classmethod
    def named(cls, names: Iterable[str], device: torch.device) -> AttachedLosses:
        with torch.inference_mode(False):
            return cls(torch.ones((), device=device), {name: torch.zeros((), device=device) for name in names})

    def reset(self) -> None:
        """Begin a step."""
        for term in self.terms.values():
            term.zero_()

    def weigh(self, loss: Tensor) -> Tensor:
        """The loss of a microbatch, whose backward pass then weights the attached ones as it is weighted itself."""
        return _Weigh.apply(loss, self.weight)


def attach_loss(x: Tensor, loss: Tensor, losses: AttachedLosses | None, name: str) -> Tensor:
    """x, whose backward pass also differentiates an auxiliary loss: its gradients are those of the microbatch's loss plus this one.

    x: [...] that the microbatch's loss depends on. loss: a scalar, already times its coefficient. losses: of the layer's context
    (None: nothing is trained). name: one of LayerPart.losses, under which the loss is logged.
    """
    if losses is None or not torch.is_grad_enabled():
        return x
    return _AttachLoss.apply(x, loss, losses.weight, losses.terms[name])


def add_in_backward(x: Tensor, total: Tensor, increment: Tensor) -> Tensor:
    """x, whose backward pass adds `increment` to `total`, which has its shape: a sum over the step's microbatches."""
    return _AddInBackward.apply(x, total, increment) if torch.is_grad_enabled() else x


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None]:
        # Saved by the layers, which shall read what it is now.
        with torch.autograd._unsafe_preserve_version_counter(ctx.weight):
            ctx.weight.copy_(d_loss)
        return d_loss, None


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(loss, weight)
        ctx.term = term
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None, None]:
        loss, weight = ctx.saved_tensors
        ctx.term.add_(weight * loss.detach())
        return d_x, weight.to(loss.dtype), None, None


class _AddInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, increment: Tensor) -> Tensor:
        ctx.save_for_backward(increment)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:
        ctx.total.add_(ctx.saved_tensors[0])
        return d_x, None, None
