"""The causal depthwise convolution and SiLU over a prefix tree, in Triton; forward only.

A token's window is gathered: its neighbours, or at the beginning of a segment the last tokens of the segment that it continues.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.sigmoid import sigmoid

# Untuned; for AMD compiled only. A thread holds 8 channels of some tokens: 16 bytes of each in bf16.
_LAUNCH = {
    "nvidia": {"tokens": 16, "channels": 256, "num_warps": 4},
    "amd": {"tokens": 16, "channels": 256, "num_warps": 4},
}


def prefix_tree_conv(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, vendor: str) -> Tensor:
    """x: [1, T, channels], its channels side by side; weight: [channels, width]; before: [T, width - 1], as of
    `predecessors`. Returns y like x, contiguous. No gradients.
    """
    _, seq_len, channels = x.shape
    assert x.shape[0] == 1 and x.stride(2) == 1 and weight.is_contiguous() and before.is_contiguous()
    launch = _LAUNCH["amd" if vendor == "amd" else "nvidia"]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _convolve[cdiv(channels, launch["channels"]), cdiv(seq_len, launch["tokens"])](
        x, weight, bias, before, y, seq_len, channels, x.stride(1),
        WIDTH=weight.shape[1], TOKENS=launch["tokens"], CHANNELS=launch["channels"], num_warps=launch["num_warps"],
    )  # fmt: skip
    return y


@jit
def _convolve(
    x, weight, bias, before, y, seq_len, channels, x_token,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Program (tile of channels, tile of tokens)."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    valid, inside = channel < channels, t < seq_len
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        at = t
        if k > 0:
            at = tl.load(before + t * (WIDTH - 1) + (k - 1), mask=inside, other=-1)
        mask = (inside & (at >= 0))[:, None] & valid[None, :]
        value = tl.load(x + at.to(tl.int64)[:, None] * x_token + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * WIDTH + (WIDTH - 1 - k), mask=valid, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    silu = total * sigmoid(total)
    to = y + t.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, silu.to(y.dtype.element_ty), mask=inside[:, None] & valid[None, :])
