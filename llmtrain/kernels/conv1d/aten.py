"""Causal depthwise convolution and SiLU by F.conv1d, which wants the sequence last."""

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


def build(spec: Conv1dSpec, platform: Platform, variant: str):
    return causal_conv1d_silu


def causal_conv1d_silu(x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: None = None) -> Tensor:
    """x: [batch, T, channels]; weight: [channels, K]; bias: [channels] or None -> like x."""
    assert document_ids is None, "refused by the spec"
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).transpose(1, 2)
