"""Causal depthwise convolution and SiLU as a sum of shifted copies. Channels stay last throughout."""

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


def build(spec: Conv1dSpec, platform: Platform, variant: str):
    return causal_conv1d_silu


def causal_conv1d_silu(x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None = None) -> Tensor:
    """silu(bias + sum over k of weight[:, k] * x[:, t - K + 1 + k]).

    x: [batch, T, channels]; weight: [channels, K]; bias: [channels] or None; document_ids: [batch, T], integers that
    never fall: where they change, a document begins, and taps do not reach beyond -> like x.
    """
    seq_len, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    ids = None if document_ids is None else F.pad(document_ids, (width - 1, 0), value=-1)

    def tap(k: int) -> Tensor:
        before = padded[:, k : k + seq_len]
        if ids is not None:
            before = before.masked_fill((ids[:, k : k + seq_len] != document_ids)[..., None], 0)
        return before * weight[:, k]

    y = tap(0)
    for k in range(1, width):
        y = y + tap(k)
    return F.silu(y if bias is None else y + bias)
