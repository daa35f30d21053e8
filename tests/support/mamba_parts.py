"""Inputs and comparisons of the kernels around the scan, shared by the tests in Triton's interpreter and on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def draw(*shape: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def conv_inputs(
    batch: int, seq_len: int, channels: int, width: int, biased: bool, dtype: torch.dtype, device: str = "cpu"
) -> list[Any]:
    """x (a slice of a wider projection), weight and bias, which may be None."""
    x = draw(batch, seq_len, channels + 24, seed=seq_len, dtype=dtype, device=device)[..., 8:-16]
    weight, bias = (draw(*shape, seed=width, dtype=dtype, device=device) for shape in ((channels, width), (channels,)))
    return [x, weight, bias if biased else None]


def norm_inputs(leading: tuple[int, ...], dim: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """x, z (a slice of a wider projection) and weight."""
    x, z = (draw(*leading, width, seed=width, dtype=dtype, device=device) for width in (dim, dim + 24))
    return [x, z[..., 8:-16], 1 + 0.5 * draw(dim, seed=dim, dtype=dtype, device=device)]


def outcome(function: Callable[..., Tensor], tensors: Sequence[Any], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The output and the gradients of a random projection of it, in order; all computed in `dtype`, if given."""
    leaves = [t if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    y = function(*leaves)
    upstream = draw(*y.shape, seed=3, dtype=tensors[0].dtype, device=str(y.device)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], upstream)]


def peak_bytes(function: Callable[..., Tensor], tensors: Sequence[Any]) -> int:
    """Peak of a GPU's memory, above the inputs and the gradient of the output, while it runs forward and backward."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    wanted = [t for t in leaves if t is not None]
    up = torch.ones_like(function(*leaves))
    for _ in range(2):  # first, kernels are compiled
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = function(*leaves)
        torch.autograd.grad(y, wanted, up)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del y
    return peak


def assert_agrees(ours: Sequence[Tensor], exact: Sequence[Tensor], tolerance: float = 1e-4) -> None:
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        torch.testing.assert_close(
            a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda m, i=i: f"{'gradient ' * (i > 0)}{i}: {m}"
        )


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Relative, in the norm of a whole tensor."""
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
