"""One token of the causal depthwise convolution and SiLU in one Triton kernel, the shift of the window included."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.platform import Platform

# Untuned; for AMD compiled only. Small blocks: at batch 1 a few thousand channels should still use many multiprocessors.
_LAUNCH = {"nvidia": {"channels": 256, "num_warps": 2}, "amd": {"channels": 256, "num_warps": 1}}


def build(spec: Conv1dSpec, platform: Platform, variant: str) -> TritonConv1dStep:
    return TritonConv1dStep(spec, platform)


class TritonConv1dStep:
    """The signature of causal_conv1d_silu_step. x may be a slice of a projection; its last dim is contiguous."""

    def __init__(self, spec: Conv1dSpec, platform: Platform):
        self.spec = spec
        launch = _LAUNCH["amd" if platform.vendor == "amd" else "nvidia"]
        self.block, self.num_warps = launch["channels"], launch["num_warps"]

    def __call__(self, x: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        batch, channels = x.shape
        assert (channels, weight.shape) == (self.spec.channels, (self.spec.channels, self.spec.width))
        assert window.shape == (batch, channels, self.spec.width - 1)
        assert x.stride(1) == 1 and weight.is_contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _step[cdiv(channels, self.block), batch](
            *(x, window, weight, bias, y, channels, x.stride(0), *window.stride()),
            WIDTH=self.spec.width,
            BLOCK=self.block,
            num_warps=self.num_warps,
        )
        return y


@jit
def _step(
    x, window, weight, bias, y, channels, x_row, window_row, window_channel, window_tap, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of channels, row of the batch)."""
    channel, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    valid = channel < channels
    newest = tl.load(x + row * x_row + channel, mask=valid, other=0.0)
    window += row.to(tl.int64) * window_row + channel * window_channel
    weight += channel * WIDTH
    total = newest.to(tl.float32) * tl.load(weight + WIDTH - 1, mask=valid, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    # A slot is overwritten only after it was read.
    for k in tl.static_range(WIDTH - 1):
        tap = tl.load(window + k * window_tap, mask=valid, other=0.0)
        total += tap.to(tl.float32) * tl.load(weight + k, mask=valid, other=0.0).to(tl.float32)
        if k > 0:
            tl.store(window + (k - 1) * window_tap, tap, mask=valid)
    if WIDTH > 1:
        tl.store(window + (WIDTH - 2) * window_tap, newest.to(window.dtype.element_ty), mask=valid)
    silu = total / (1.0 + tl.exp(-total))
    tl.store(y + row * channels + channel, silu.to(y.dtype.element_ty), mask=valid)
