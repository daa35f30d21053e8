"""One token of the causal depthwise convolution and SiLU, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform


def build(spec: Conv1dSpec, platform: Platform, variant: str):
    return causal_conv1d_silu_step


def causal_conv1d_silu_step(x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(bias + sum over the window and x of tap * weight), in fp32 or wider; then x joins the window in place.

    x: [batch, channels]; window: [batch, channels, K - 1], the inputs before x, oldest first; weight: [channels, K];
    bias: [channels] or None. Returns a tensor like x.

    The window may have any strides. On a GPU it is read fastest with channels contiguous, as a view of a buffer
    [batch, K - 1, channels]: `buffer.transpose(1, 2)`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = torch.cat([window, x[..., None].to(window.dtype)], dim=-1)
    y = (taps.to(wide) * weight.to(wide)).sum(-1)
    window.copy_(taps[..., 1:])
    return F.silu(y if bias is None else y + bias.to(wide)).to(x.dtype)
