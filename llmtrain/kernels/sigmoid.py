"""A cheap sigmoid for kernels that would otherwise be bound by arithmetic instead of memory."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of fp32.

    exp2 and rsqrt are one instruction each on NVIDIA. tl.exp and a division take about seven more, for arguments close to
    0 or to infinity. Here a root's argument is at least 1, and where it is infinite 0 is right. Two roots are as exact as
    that division, within 1e-6.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root
