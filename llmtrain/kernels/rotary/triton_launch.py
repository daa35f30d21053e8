"""Launch parameters of the rotary kernel."""

from dataclasses import dataclass

from llmtrain.kernels.options import Count, Options, Power, Warps


@dataclass(frozen=True)
class Launch(Options):
    """block_tokens: tokens of a program, a power of two. block_heads: heads that a program loops over with its cosines and
    sines in registers.
    """

    block_tokens: Power
    block_heads: Count
    num_warps: Warps
