"""The inside of a Mamba-2 mixer (Dao & Gu, arXiv:2405.21060) as the composition of its three operations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.reference import ReferenceSSD


def build(spec: MambaMixerSpec, platform: Platform, variant: str) -> ReferenceMambaMixer:
    return ReferenceMambaMixer(spec)


def compose(
    spec: MambaMixerSpec, zxbcdt: Tensor, convolve: Callable[[Tensor], Tensor],
    scan: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], norm: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The second projection's input, [batch, T, d_inner], from the first's output, [batch, T, sum of spec.widths].

    convolve: xBC -> like it; scan: (x [batch, T, heads, head_dim], dt [batch, T, heads], B, C [batch, T, groups,
    d_state]) -> y like x; norm: (y, z [batch, T, d_inner]) -> like y.
    """
    z, xBC, dt = zxbcdt.split(spec.widths, dim=-1)
    x, B, C = convolve(xBC).split(spec.conv_widths, dim=-1)
    x = x.unflatten(-1, (spec.ssd.n_heads, spec.ssd.head_dim))
    B, C = (t.unflatten(-1, (spec.ssd.n_groups, spec.ssd.d_state)) for t in (B, C))
    return norm(scan(x, dt, B, C).flatten(-2), z)


class ReferenceMambaMixer:
    def __init__(self, spec: MambaMixerSpec):
        self.spec, self.scan, self.norm = spec, ReferenceSSD(spec.ssd), ReferenceGatedNorm(spec.gated_norm)

    def __call__(
        self, zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
        A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """zxbcdt: [batch, T, sum of spec.widths]; conv_weight: [channels, K]; conv_bias: [channels] or None; A (negative),
        D, dt_bias: [heads]; norm_weight: [d_inner]; initial_state: [batch, heads, head_dim, d_state];
        document_ids: [batch, T], integers that never fall: where they change, a document begins, which sees nothing of the
        one before; the initial state belongs to the first.
        Returns [batch, T, d_inner], in zxbcdt's dtype.
        """
        return compose(
            self.spec,
            zxbcdt,
            lambda xBC: causal_conv1d_silu(xBC, conv_weight, conv_bias, document_ids),
            lambda x, dt, B, C: self.scan(x, dt, A, B, C, D, dt_bias, initial_state, document_ids)[0],
            lambda y, z: self.norm(y, z, norm_weight),
        )
