"""Frozen weights of linear layers in 4 bits (QLoRA, Dettmers et al., arXiv:2305.14314): NormalFloat4 with scales in 8 bits.

Storage of our own rather than torchao's NF4Tensor or bitsandbytes': plain tensors and a few operators, which the compiler makes one
kernel of on any GPU, and which trace in one graph, also with checkpointing. FSDP2 leaves these weights alone: every rank
has all of them, at about half a byte each, and none is gathered.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.adapt.adapters import Down, Up, adapted_class
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layers import Head, Linear
from llmtrain.schema.adapt import NF4_BLOCK as BLOCK
from llmtrain.schema.adapt import NF4_SCALES as SCALES

# Quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (appendix E of the paper).
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_AT_ONCE = 2**24


class NF4(NamedTuple):
    """codes: [blocks * 32] of two weights each; scales: [blocks] int8; steps: [groups] fp32, of a scale's unit; mean: of scales."""

    codes: Tensor
    scales: Tensor
    steps: Tensor
    mean: Tensor
    shape: torch.Size
    dtype: torch.dtype


def quantised(weight: Tensor) -> NF4:
    """weight: [d_out, d_in], on the device that computes."""
    flat = weight.detach().reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % BLOCK))
    blocks = flat.view(-1, BLOCK)
    table = torch.tensor(TABLE, device=weight.device)
    largest = torch.cat([part.abs().amax(1).float() for part in blocks.split(_AT_ONCE // BLOCK)])
    mean = largest.mean()
    groups = F.pad(largest - mean, (0, -len(largest) % SCALES)).view(-1, SCALES)
    steps = groups.abs().amax(1).clamp(min=1e-30) / 127
    scales = (groups / steps[:, None]).round().to(torch.int8).view(-1)[: len(largest)]
    stored = _widened(scales, steps, mean)
    bounds = (table[1:] + table[:-1]) / 2
    codes = []
    for part, scale in zip(blocks.split(_AT_ONCE // BLOCK), stored.split(_AT_ONCE // BLOCK), strict=True):
        # A scale that rounding has made 0 or less is of a block of nearly nothing.
        ratio = part.float() / torch.where(scale > 0, scale, torch.inf)[:, None]
        code = torch.bucketize(ratio, bounds).to(torch.uint8).view(-1, 2)
        codes.append(code[:, 0] * 16 + code[:, 1])
    return NF4(torch.cat(codes), scales, steps, mean, weight.shape, weight.dtype)


def widened(
    codes: Tensor, scales: Tensor, steps: Tensor, mean: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """The weight [d_out, d_in] that is stored."""
    table = torch.tensor(TABLE, device=codes.device)
    # Shifts rather than a stack of both halves: what concatenates is kept by the compiler for the gradient, a byte per weight.
    halves = codes[:, None] >> torch.tensor((4, 0), dtype=torch.uint8, device=codes.device) & 15
    values = table[halves.int()].view(-1, BLOCK)
    flat = (values * _widened(scales, steps, mean)[:, None]).to(dtype).reshape(-1)
    return flat[: shape.numel()].view(shape)


def _widened(scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    return scales.float() * steps.repeat_interleave(SCALES)[: len(scales)] + mean


class _Product(torch.autograd.Function):
    """x W^T, which keeps the stored form of W for the gradient of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, steps: Tensor, mean: Tensor, rows: int, columns: int
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, steps, mean)
        ctx.shape = torch.Size((rows, columns))
        return F.linear(x, widened(codes, scales, steps, mean, ctx.shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient], (codes, scales, steps, mean) = gradients, ctx.saved_tensors
        weight = widened(codes, scales, steps, mean, ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None, None, None


class StoredLinear(Linear):
    """A frozen linear layer whose weight is `stored` in fewer bits. It has no parameter `weight`, but the property: what they stand
    for."""

    stored: NamedTuple

    def multiply(self, x: Tensor) -> Tensor:
        """x W^T."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        y = self.multiply(input)
        y = y if self.summing is None else self.summing.leave(y)
        return y if self.bias is None else y + self.bias


class NF4Linear(StoredLinear):
    """A frozen linear layer whose weight is `stored` in 4 bits."""

    stored: NF4

    @property
    def weight(self) -> Tensor:
        one = self.stored
        return widened(one.codes, one.scales, one.steps, one.mean, one.shape, one.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        one = self.stored
        return _Product.apply(x, one.codes, one.scales, one.steps, one.mean, *one.shape)


def linear_layers(model: HybridLM) -> Iterator[Linear]:
    """The model's own: without its head and adapters' matrices."""
    return (
        module for module in model.modules() if isinstance(module, Linear) and not isinstance(module, Head | Down | Up)
    )


def frozen_linears(model: HybridLM) -> Iterator[Linear]:
    """The layers whose weights are stored in 4 bits."""
    return (linear for linear in linear_layers(model) if not linear.weight.requires_grad)


def store(linear: Linear, kind: type[StoredLinear], stored: NamedTuple) -> None:
    """Make a linear layer one whose weight is stored."""
    del linear._parameters["weight"]
    linear.__class__ = adapted_class(kind) if hasattr(linear, "lora") else kind
    linear.__dict__["stored"] = stored  # no buffer: casts of the model leave it as it is


@torch.no_grad()
def quantise(model: HybridLM, device: torch.device) -> None:
    """Replace the weights of frozen linear layers, one after another. device: of the model."""
    for linear in list(frozen_linears(model)):
        store(linear, NF4Linear, quantised(linear.weight.to(device)))


def wait_in_host_memory(model: HybridLM) -> None:
    """Have the weights loaded there, from where `quantise` takes them."""
    for linear in frozen_linears(model):
        linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="cpu"), requires_grad=False)
