"""Experts in PyTorch: rows of tokens sorted by expert, two products of groups of rows, and the sum by token. No token is dropped.

A row is one meeting of a token with an expert: there are T * top_k, whatever the router chose, so that all shapes are known to the
host. `grouped_mm` differs in the product alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.glu.reference import feed_forward_unit
from llmtrain.kernels.operators import operator, register_autograd
from llmtrain.kernels.platform import Platform

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [N, d], weight [n, out, d], ends [n]) -> [N, out]: rows before ends[0] times weight[0], those before ends[1] times
weight[1], and so on."""


class Rows(NamedTuple):
    """The order of the rows. order: [N], number among T * top_k of each row, by expert; inverse: its inverse. ends: [n_experts]
    in int32, one behind the last row of each expert. experts: [N], of each row."""

    order: Tensor
    inverse: Tensor
    ends: Tensor
    experts: Tensor

    @classmethod
    def of(cls, chosen: Tensor, n_experts: int) -> Rows:
        """chosen: [T, top_k], integers."""
        flat = chosen.flatten()
        experts, order = flat.sort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.zeros(n_experts, dtype=torch.int32, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        return cls(order, inverse, counts.cumsum(0, dtype=torch.int32), experts)


class ReferenceExperts:
    """x: [T, d_model], chosen: [T, top_k] experts of each token, all different, weights: [T, top_k] of their outputs, in fp32;
    w_in [n_experts, d_in, d_model], w_out [n_experts, d_model, d_ff], b_in [n_experts, d_in], b_out [n_experts, d_model]
    -> the weighted sum of the outputs, like x."""

    def __init__(self, spec: ExpertsSpec, product: Product | None = None):
        self.spec, self.product = spec, product or grouped_product

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None = None,
        b_out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows = Rows.of(chosen, self.spec.n_experts)
        h = self.product(take(x, rows), w_in, rows.ends)
        h = h if b_in is None else h + b_in[rows.experts]
        y = self.product(feed_forward_unit(h, self.spec.activation), w_out, rows.ends)
        y = y if b_out is None else y + b_out[rows.experts]
        return combine(y, weights, rows)


def take(x: Tensor, rows: Rows) -> Tensor:
    """The rows [N, d] of tokens x [T, d], in their order."""
    return _Take.apply(x, rows.order, rows.inverse)


def combine(y: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """The sums [T, d] over the rows y [N, d] of each token, times weights [T, top_k]."""
    return _Combine.apply(y, weights, rows.order, rows.inverse)


class _Take(torch.autograd.Function):
    """The rows of tokens. Its gradient is a sum over the rows of each token, which autograd's of an index would have to search."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = len(x)
        return x[order // (len(order) // max(len(x), 1))]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return d_rows[inverse].view(ctx.tokens, -1, d_rows.shape[1]).sum(1), None, None


class _Combine(torch.autograd.Function):
    """The sum over the rows y [N, d] of each token, times weights [T, top_k]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order, inverse)
        total = (y[inverse].view(*weights.shape, -1) * weights[..., None]).sum(1)
        # Of a cast that is none, Dynamo (torch 2.11) would make gradients of 0.
        return total if total.dtype == y.dtype else total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, order, inverse = ctx.saved_tensors
        d_y = d_out[order // weights.shape[1]] * weights.flatten()[order][:, None]
        d_weights = (y[inverse].view(*weights.shape, -1).to(weights.dtype) * d_out[:, None]).sum(-1)
        return d_y.to(y.dtype), d_weights.to(weights.dtype), None, None


def launch_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """A Product, expert by expert."""
    groups = rows.tensor_split(ends[:-1].long().cpu())
    return torch.cat([group @ one.T for group, one in zip(groups, weight, strict=True)])


def launch_weight_gradient(d: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of a product's weight: d [N, out], rows [N, d] -> [n, out, d]."""
    cuts = ends[:-1].long().cpu()
    pairs = zip(d.tensor_split(cuts), rows.tensor_split(cuts), strict=True)
    return torch.stack([of_output.T @ group for of_output, group in pairs])


def grouped_operators(
    suffix: str,
    product: Callable[..., Tensor],
    weight_gradient: Callable[..., Tensor],
    of_gradients: Callable[..., Tensor] | None = None,
) -> Product:
    """The product as an operator, opaque to the compiler, with its gradients. of_gradients: the product that the gradient of rows
    is, where it is another."""
    forward = operator(f"grouped_product{suffix}", product)
    of_rows = forward if of_gradients is None else operator(f"grouped_rows_gradient{suffix}", of_gradients)
    for op in {forward, of_rows}:
        torch.library.register_fake(op)(lambda rows, weight, ends: rows.new_empty(rows.shape[0], weight.shape[1]))
    of_weight = operator(f"grouped_weight_gradient{suffix}", weight_gradient)
    torch.library.register_fake(of_weight)(lambda d, rows, ends: d.new_empty(ends.shape[0], d.shape[1], rows.shape[1]))

    def save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        d = d.contiguous()
        d_rows = of_rows(d, weight.mT, ends) if ctx.needs_input_grad[0] else None
        return d_rows, of_weight(d, rows, ends) if ctx.needs_input_grad[1] else None, None

    register_autograd(forward, backward, save)
    return forward


grouped_product = grouped_operators("", launch_product, launch_weight_gradient)


def build(spec: ExpertsSpec, platform: Platform, variant: str) -> ReferenceExperts:
    return ReferenceExperts(spec)
