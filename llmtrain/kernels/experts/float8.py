"""Experts whose products are in float8: the scales of train.float8's recipes, and the reference.

In float8 are a product in the forward pass and that of its input's gradient. The gradient of a weight sums over the rows of an
expert, of which there is any number, and stays in the computation's format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.experts.reference import (
    Product,
    ReferenceExperts,
    grouped_operators,
    launch_product,
    launch_weight_gradient,
)
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.platform import Platform, float8_format

_LEAST = 1e-12
"""Largest magnitude of what has none, so that no scale is infinite."""
_EXPONENT = 0x7F800000


@dataclass(frozen=True)
class Float8Formats:
    """rowwise: a scale for each row of rows and for each output channel of each expert, powers of 2; else one for all rows and one
    for each expert's matrix. forward: of rows and weights; gradient: of outputs' gradients."""

    rowwise: bool
    forward: torch.dtype = torch.float8_e4m3fn
    gradient: torch.dtype = torch.float8_e4m3fn

    @classmethod
    def of(cls, recipe: str, platform: Platform) -> Float8Formats:
        forward = getattr(torch, float8_format(platform))
        wide = torch.float8_e5m2fnuz if forward == torch.float8_e4m3fnuz else torch.float8_e5m2
        return cls(recipe != "tensorwise", forward, wide if recipe == "tensorwise" else forward)


def scales_of(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype, rowwise: bool) -> Tensor:
    """Factors of numbers in float8: of x [...] -> fp32, with 1 in place of `dims`, over which the largest magnitude is
    taken. NaN where x has one, or an infinite number."""
    largest = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, dtype=torch.float32)
    scale = largest.clamp(min=_LEAST) / torch.finfo(dtype).max
    if rowwise:  # the next power of 2 from below for its inverse
        scale = (scale.view(torch.int32) + (~_EXPONENT & 0x7FFFFFFF) & _EXPONENT).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def rounded(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype, rowwise: bool) -> Tensor:
    """The numbers in fp32 that x has in float8."""
    scale, limit = scales_of(x, dims, dtype, rowwise), torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype).float() * scale


def _emulated(name: str, formats: Float8Formats) -> Product:
    rowwise = formats.rowwise

    def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return multiply(rows, weight, ends, formats.forward)

    def of_rows(d: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return multiply(d, weight, ends, formats.gradient)

    def multiply(rows: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        if not len(rows):
            return rows.new_empty(0, weight.shape[1])
        left = rounded(rows, (1,) if rowwise else (0, 1), dtype, rowwise)
        right = rounded(weight, (2,) if rowwise else (1, 2), formats.forward, rowwise)
        return launch_product(left, right, ends).to(rows.dtype)

    return grouped_operators(f"_float8_{name}", product, launch_weight_gradient, of_rows)


_PRODUCTS = {
    "tensorwise": _emulated("tensorwise", Float8Formats(False, gradient=torch.float8_e5m2)),
    "rowwise": _emulated("rowwise", Float8Formats(True)),
}


def emulated_experts(spec: ExpertsSpec, recipe: str) -> ReferenceExperts:
    """The reference. recipe: of train.float8."""
    return ReferenceExperts(spec, _PRODUCTS["tensorwise" if recipe == "tensorwise" else "rowwise"])
