"""Casts to float8 in PyTorch, as torchao rounds."""

import torch
from torch import Tensor


def float8_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x * scale in float8, and its transpose: [M, N] and [N, M], both contiguous.

    x: [M, N]. scale: fp32, one number. What does not fit the format becomes its largest number, as what is rounded to it is.
    """
    largest = torch.finfo(dtype).max
    rounded = (x.float() * scale).clamp(-largest, largest).to(dtype)
    return rounded, rounded.t().contiguous()


def float8_transpose(x: Tensor, after: Tensor) -> Tensor:
    """The transpose of a float8 matrix [M, N], contiguous: [N, M]. after: see triton.py."""
    return x.t().contiguous()
