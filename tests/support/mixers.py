"""Inputs of the inside of a Mamba-2 mixer, shared by the tests in Triton's interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.support.mamba_parts import draw

NAMES = ("zxbcdt", "conv_weight", "conv_bias", "A", "D", "dt_bias", "norm_weight", "initial_state")
"""Names of the inputs."""


def spec(
    n_heads: int,
    head_dim: int,
    d_state: int,
    n_groups: int = 1,
    width: int = 4,
    norm_groups: int = 1,
    norm_first: bool = False,
    dt_limit: tuple[float, float | None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> MambaMixerSpec:
    name, d_inner = str(dtype).removeprefix("torch."), n_heads * head_dim
    return MambaMixerSpec(
        Conv1dSpec(d_inner + 2 * n_groups * d_state, width, name),
        SSDSpec(n_heads, head_dim, d_state, n_groups, 64, dt_limit, name),
        GatedNormSpec(d_inner, norm_groups, 1e-5, norm_first, name),
    )


def inputs(
    of: MambaMixerSpec, batch: int, seq_len: int, biased: bool = True, with_state: bool = False, device: str = "cpu"
) -> list[Any]:
    """zxbcdt, the weight and bias of the convolution, A, D, dt_bias, the norm's weight, and an initial state or None.

    In the spec's dtype, but for A, D, dt_bias and the state: as under amp_bf16 and FSDP2.
    """
    heads, conv, dtype = of.ssd.n_heads, of.conv1d, getattr(torch, of.dtype)
    wide, narrow = ({"dtype": t, "device": device} for t in (torch.float32, dtype))
    zxbcdt = draw(batch, seq_len, sum(of.widths), seed=seq_len, **narrow)
    weight = draw(conv.channels, conv.width, seed=1, **narrow)
    bias = draw(conv.channels, seed=2, **narrow) if biased else None
    A, D = -(draw(heads, seed=4, **wide).exp()), draw(heads, seed=5, **wide)
    dt_bias, norm = draw(heads, seed=6, **wide) - 2, 1 + 0.5 * draw(of.gated_norm.dim, seed=7, **narrow)
    state = (batch, heads, of.ssd.head_dim, of.ssd.d_state)
    return [zxbcdt, weight, bias, A, D, dt_bias, norm, draw(*state, seed=8, **wide) if with_state else None]
