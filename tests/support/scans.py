"""Inputs of the scan over whole sequences and what is compared: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec

NAMES = ("y", "final state", "x", "dt", "A", "B", "C", "D", "dt_bias", "initial state")


def inputs(
    spec: SSDSpec, batch: int, seq_len: int, dtype: torch.dtype, with_state: bool = False, device: str = "cpu"
) -> list[Tensor]:
    """x, dt, A, B, C, D, dt_bias and perhaps a state: as after a projection, x, B and C slices of one row, dt of another.

    Time steps spread from 1e-4 to 1, decays per token from none to all.
    """
    g = torch.Generator().manual_seed(seq_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    widths = [spec.n_heads * spec.head_dim, spec.n_groups * spec.d_state, spec.n_groups * spec.d_state]
    x, B, C = draw(batch, seq_len, sum(widths)).to(dtype).split(widths, dim=-1)
    x = x.unflatten(-1, (spec.n_heads, spec.head_dim))
    B, C = (t.unflatten(-1, (spec.n_groups, spec.d_state)) for t in (B, C))
    dt = (2 * draw(batch, seq_len, 3 + spec.n_heads)).to(dtype)[..., 3:]
    A, D, dt_bias = -(2 * draw(spec.n_heads)).exp(), draw(spec.n_heads), draw(spec.n_heads) - 3
    state = [draw(batch, spec.n_heads, spec.head_dim, spec.d_state)] if with_state else []
    return [x, dt, A, B, C, D, dt_bias, *state]


def outcome(
    kernel: Callable[..., tuple[Tensor, Tensor]], tensors: Sequence[Tensor], wide: bool = False, **options: Tensor
) -> dict[str, Tensor]:
    """y, the final state, and the gradients of a random projection of both; with `wide`, all in float64."""
    leaves = [t.detach().double().requires_grad_() if wide else t.detach().requires_grad_() for t in tensors]
    y, state = kernel(*leaves, **options)
    g = torch.Generator().manual_seed(3)
    # The same numbers for both, those that y's dtype can hold.
    upstream = [torch.randn(t.shape, generator=g).to(tensors[0].dtype).to(t) for t in (y, state)]
    found = torch.autograd.grad([y, state], leaves, upstream)
    return dict(zip(NAMES, (y.detach(), state.detach(), *found), strict=False))


def exact(spec: SSDSpec, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The reference in float64."""
    return outcome(ReferenceSSD(spec), tensors, wide=True)


def errors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative, in the norm of a whole tensor. NaN where there is one in ours."""
    assert ours.keys() == expected.keys()
    return {k: ((ours[k].double() - e).norm() / e.norm().clamp_min(1e-30)).item() for k, e in expected.items()}
