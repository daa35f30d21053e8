"""Losses that arise inside a layer, and sums over the microbatches of a step, both of which belong to the whole step.

Both act in the backward pass, which every microbatch of training has once: layers whose activations are computed again count
nothing twice, and validation and decoding count nothing. All numbers are tensors on the device, which CUDA graphs read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.distributed_c10d import GroupName

from llmtrain.models.passing import passed_on, read_in_backward


@dataclass(frozen=True)
class TokenSharers:
    """Ranks that share the tokens of a microbatch, each with as many of them (train.parallel.context, tensor).

    size: their number. group: its name among torch.distributed's process groups. copies: those of them that compute one loss, whose
    gradients are added up (tensor).
    """

    size: int
    copies: int
    group: GroupName

    def total(self, summand: Tensor) -> Tensor:
        """The sum over these ranks, without gradient."""
        return collectives.all_reduce(summand.detach(), "sum", self.group)


@dataclass(frozen=True)
class AttachedLosses:
    """weight: of the microbatch in the step's loss, an fp32 scalar. terms: by name, the sum over layers and microbatches of each
    loss times its microbatch's weight; the mean over the ranks is the step's. counts: of each layer that pools with others, what
    its forward pass wrote; pooled: their sum as the backward pass begins, when all are there (see attach_pooled).

    `weigh` sets the weight as the backward pass begins: the gradient that arrives at the microbatch's loss, or where ranks share
    its tokens their mean, for a loss of tokens that have no label too.
    """

    weight: Tensor
    terms: dict[str, Tensor]
    counts: list[Tensor] = field(default_factory=list)
    pooled: Tensor | None = None
    sharers: TokenSharers | None = None

    @classmethod
    def named(
        cls,
        names: Iterable[str],
        device: torch.device,
        pooling: Sequence[int] = (),
        sharers: TokenSharers | None = None,
    ) -> AttachedLosses:
        """pooling: the width of each layer's counts, all the same."""
        with torch.inference_mode(False):
            counts = [torch.zeros(width, device=device) for width in pooling]
            pooled = torch.zeros_like(counts[0]) if counts else None
            terms = {name: torch.zeros((), device=device) for name in names}
            return cls(torch.ones((), device=device), terms, counts, pooled, sharers)

    def reset(self) -> None:
        """Begin a step."""
        for term in self.terms.values():
            term.zero_()

    def over_sharers(self, counts: Tensor) -> Tensor:
        """Counts of a layer in a microbatch, of all ranks that share it."""
        return counts if self.sharers is None else self.sharers.total(counts)

    def weigh(self, loss: Tensor, weight: float | None = None) -> Tensor:
        """The loss of a microbatch, whose backward pass then weights the attached ones as it is weighted itself. weight: of the
        microbatch, in a stage of a pipeline where the backward pass begins at other tensors than the loss, of which this is one."""
        return _Weigh.apply(loss, self, weight)


def attach_loss(x: Tensor, loss: Tensor, losses: AttachedLosses | None, name: str) -> Tensor:
    """x, whose backward pass also differentiates an auxiliary loss: its gradients are those of the microbatch's loss plus this one.

    x: [...] that the microbatch's loss depends on. loss: a scalar, already times its coefficient. losses: of the layer's context
    (None: nothing is trained). name: one of LayerPart.losses, under which the loss is logged.
    """
    if losses is None or not torch.is_grad_enabled():
        return x
    return _AttachLoss.apply(x, loss, losses.weight, losses.terms[name])


def attach_pooled(x: Tensor, mine: Tensor, losses: AttachedLosses | None, name: str) -> Tensor:
    """attach_loss of the inner product of `mine` [width] with the sum of all layers' counts (AttachedLosses.counts), which are
    constants. Later layers' counts are there by the time of the backward pass alone."""
    if losses is None or not torch.is_grad_enabled():
        return x
    assert losses.pooled is not None
    return _AttachPooled.apply(x, mine, losses.pooled, losses.weight, losses.terms[name])


def add_in_backward(x: Tensor, total: Tensor, increment: Tensor) -> Tensor:
    """x, whose backward pass adds `increment` to `total`, which has its shape: a sum over the step's microbatches."""
    return _AddInBackward.apply(x, total, increment) if torch.is_grad_enabled() else x


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: AttachedLosses, weight: float | None) -> Tensor:
        ctx.losses, ctx.weight = losses, weight
        return passed_on(loss)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, None, None]:
        losses, sharers = ctx.losses, ctx.losses.sharers
        weight = d_loss if ctx.weight is None else torch.full_like(losses.weight, ctx.weight)
        if sharers is not None:
            weight = sharers.total(weight) / (sharers.size * sharers.copies)
        # Saved by the layers, which shall read what it is now.
        with torch.autograd._unsafe_preserve_version_counter(losses.weight):
            losses.weight.copy_(weight)
        if losses.pooled is not None:
            with torch.autograd._unsafe_preserve_version_counter(losses.pooled):
                losses.pooled.copy_(torch.stack(losses.counts).sum(0))
        return d_loss, None, None


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, weight: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(loss, weight)
        ctx.term = term
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None, None]:
        loss, weight = ctx.saved_tensors
        weight = read_in_backward(weight, d_x)
        ctx.term.add_(weight * loss.detach())
        return d_x, weight.to(loss.dtype), None, None


class _AttachPooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mine: Tensor, pooled: Tensor, weight: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(mine, pooled, weight)
        ctx.term = term
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        mine, pooled, weight = ctx.saved_tensors
        pooled, weight = read_in_backward(pooled, d_x), read_in_backward(weight, d_x)
        ctx.term.add_(weight * (mine.detach() * pooled).sum())
        return d_x, (weight * pooled).to(mine.dtype), None, None, None


class _AddInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, increment: Tensor) -> Tensor:
        ctx.save_for_backward(increment)
        ctx.total = total
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:
        ctx.total.add_(read_in_backward(ctx.saved_tensors[0], d_x))
        return d_x, None, None
