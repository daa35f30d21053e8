"""Launch parameters of the rotary kernel, from the tuning tables."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.kernels import tuning
from llmtrain.kernels.options import Options
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec


@dataclass(frozen=True)
class Launch(Options):
    """tokens: of a program, a power of two. heads: that a program goes through with its cosines and sines in registers."""

    block_tokens: int
    block_heads: int
    num_warps: int


def default_launch(spec: RotarySpec, platform: Platform) -> Launch:
    """What the tuning table says."""
    return tuning.select("rotary", spec.dtype, {"head_dim": spec.head_dim}, platform).launch
