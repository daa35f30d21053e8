"""Causal depthwise convolution and SiLU as a sum of shifted copies. Channels stay last throughout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


def build(spec: Conv1dSpec, platform: Platform, variant: str):
    return causal_conv1d_silu


def causal_conv1d_silu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(bias + sum over k of weight[:, k] * x[:, t - K + 1 + k]).

    x: [batch, T, channels]; weight: [channels, K]; bias: [channels] or None -> like x.
    """
    width = weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    y = padded[:, : x.shape[1]] * weight[:, 0]
    for k in range(1, width):
        y = y + padded[:, k : k + x.shape[1]] * weight[:, k]
    return F.silu(y if bias is None else y + bias)
