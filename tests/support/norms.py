"""Inputs of the residual norm, shared by the tests in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from tests.support.mamba_parts import draw


def inputs(
    leading: tuple[int, ...], dim: int, summed: bool, biased: bool, dtype: torch.dtype, device: str = "cpu"
) -> list[Any]:
    """x, delta, weight and bias; delta and bias may be None. Means are not zero, as those of a residual stream."""
    x, delta = (0.3 + draw(*leading, dim, seed=seed, dtype=dtype, device=device) for seed in (dim, dim + 1))
    weight, bias = (draw(dim, seed=dim + seed, dtype=dtype, device=device) for seed in (2, 3))
    return [x, delta if summed else None, 1 + 0.5 * weight, bias if biased else None]


def joined(
    kernel: Callable[..., tuple[Tensor, Tensor]], uses: Literal["both", "norm"] = "both"
) -> Callable[..., Tensor]:
    """One output, for the gradient of both: the sum and its norm side by side; or the norm alone."""

    def run(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None) -> Tensor:
        total, y = kernel(x, delta, weight, bias)
        return y if uses == "norm" else torch.cat((total, y), -1)

    return run
