"""Ranks that share the work of every layer (train.parallel.tensor): which part of a parameter is whose, and what travels.

Between layers each rank holds a part of the tokens (sequence parallelism, Korthikanti et al., arXiv:2205.05198). A mixer or an
MLP gathers all tokens (`enter`), computes with its own heads or channels, and its last projection adds up the ranks' results
while it hands each rank its own tokens again (`leave`). All ranks compute the same loss.

So the gradient of a parameter's part that a single rank holds is complete. Of what several ranks hold (norms, biases behind a
sum, B and C or keys and values with fewer groups than ranks) each has a summand: see train/ranks/tensor_gradients.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
)
from torch.distributed.distributed_c10d import GroupName

from llmtrain.models.init import clean_name
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import Piece, Slices, shards_of

_NO_GROUP = GroupName("")


class Part(NamedTuple):
    """One of the projections that stand side by side in a parameter: `units` heads, groups or channels, divided between the ranks,
    of `width` rows each."""

    units: int
    width: int = 1


class TensorRanks:
    """This rank's place in its tensor-parallel group. Methods that exchange are called by every rank of it, in the same order.

    rank, size: of the group. group: its name among torch.distributed's process groups.
    split_tokens: between layers each rank holds its part of the tokens, as in training; else all tokens (`whole_tokens`).
    overlapped: the compiler runs exchanges beside products.
    """

    def __init__(self, rank: int, size: int, group: GroupName = _NO_GROUP):
        self.rank, self.size, self.group = rank, size, group
        self.split_tokens, self.overlapped = True, False

    @contextmanager
    def whole_tokens(self) -> Iterator[None]:
        """Context without gradients in which every rank has all tokens between layers: inputs may be of any length."""
        assert not torch.is_grad_enabled(), "sums of whole_tokens have no gradient"
        was, self.split_tokens = self.split_tokens, False
        try:
            yield
        finally:
            self.split_tokens = was

    def share(self, units: int) -> tuple[int, int, int]:
        """(first, count, copies) of this rank's units; with fewer units than ranks several ranks hold the same one."""
        if units % self.size == 0:
            count = units // self.size
            return self.rank * count, count, 1
        assert self.size % units == 0, (units, self.size)
        return self.rank * units // self.size, 1, self.size // units

    def slices(self, dim: int, parts: Sequence[Part]) -> Slices:
        """This rank's part of a parameter whose dimension `dim` is made of `parts`."""
        pieces, at = [], 0
        for units, width in parts:
            first, count, copies = self.share(units)
            pieces.append(Piece(at + first * width, count * width, copies))
            at += units * width
        return Slices(dim, at, tuple(pieces))

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's part of [batch, T, ...], where the ranks divide T."""
        if not self.split_tokens:
            return tokens
        length = tokens.shape[1] // self.size
        return tokens[:, self.rank * length : (self.rank + 1) * length]

    def enter(self, own: Tensor) -> Tensor:
        """All tokens from each rank's own, [batch, T / size, ...] -> [batch, T, ...]; gradients are summed on the way back."""
        return _Gathered.apply(own, self.size, self.group) if self.split_tokens else own

    def leave(self, summand: Tensor) -> Tensor:
        """Sums over the ranks, of each rank's own tokens: [batch, T, ...] -> [batch, T / size, ...]."""
        if not self.split_tokens:
            return all_reduce(summand, "sum", self.group)
        return _Scattered.apply(summand, self.size, self.group)

    def sum_over_sharers(self, summand: Tensor, units: int) -> Tensor:
        """Sum of a few numbers per token over the ranks with a part of the same unit, of `units` fewer than ranks.

        Every rank makes something else of the sum: gradients are summed likewise.
        """
        everyone = all_gather_tensor_autograd(summand[None].contiguous(), 0, self.group)
        sharers = self.size // units
        first = self.rank // sharers * sharers
        return everyone[first : first + sharers].sum(0)

    def total(self, summand: Tensor) -> Tensor:
        """Sum over the ranks, of which all make the same: the gradient is that of the sum."""
        return _Total.apply(summand, self.group)

    def largest(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, without gradient."""
        return all_reduce(values.detach(), "max", self.group)

    def beside(self, part: Tensor) -> Tensor:
        """The ranks' parts of the last dimension, side by side, without gradient: [..., n] -> [..., size * n]."""
        everyone = all_gather_tensor(part.detach().contiguous()[None], 0, self.group)
        return everyone.movedim(0, -2).flatten(-2)


class _Gathered(torch.autograd.Function):
    """Gathering of tokens, and scattering on the way back, in the forms that the compiler fuses with the products before and
    after them (train/ranks/async_tensor.py). The functional collectives' own derivatives have others."""

    @staticmethod
    def forward(ctx, own: Tensor, size: int, group: GroupName) -> Tensor:
        ctx.group = group
        return _all_tokens(own, size, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_tensor(gradient.contiguous(), "sum", 1, ctx.group), None, None


class _Scattered(torch.autograd.Function):
    """The transpose of _Gathered."""

    @staticmethod
    def forward(ctx, summand: Tensor, size: int, group: GroupName) -> Tensor:
        ctx.size, ctx.group = size, group
        return reduce_scatter_tensor(summand.contiguous(), "sum", 1, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_tokens(gradient, ctx.size, ctx.group), None, None


def _all_tokens(own: Tensor, size: int, group: GroupName) -> Tensor:
    """[batch, T / size, ...] -> [batch, T, ...]."""
    everyone = all_gather_tensor(own.contiguous(), 0, group)  # gathering along dim 1 does not trace
    return torch.cat(everyone.chunk(size), dim=1)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, summand: Tensor, group: GroupName) -> Tensor:
        return all_reduce(summand, "sum", group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def padding_unit(segments: ContextParallelRanks | None, ranks: TensorRanks | None) -> int:
    """The number of tokens of which the length of sequences is made a multiple, so that ranks can share them."""
    return (segments.count if segments else 1) * (ranks.size if ranks else 1)


def slices_of(model: nn.Module) -> dict[str, Slices]:
    """This rank's part of every parameter that tensor-parallel ranks divide, by the parameter's clean name."""
    return {
        clean_name(f"{path}.{name}"): slices
        for path, module in model.named_modules()
        for name, slices in shards_of(module).items()
    }
