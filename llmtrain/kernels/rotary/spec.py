"""Specification of rotary positions of queries and keys, and their backends. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_triton, refuse_untuned


@dataclass(frozen=True)
class RotarySpec:
    """Rotation of the pairs (i, i + head_dim / 2) of every head (arXiv:2104.09864)."""

    head_dim: int
    dtype: str = "bfloat16"


def refuse_triton_pairs(spec: RotarySpec, platform: Platform | None) -> str | None:
    sizes = {"head_dim": spec.head_dim}
    return refuse_triton(spec.dtype, platform) or refuse_untuned(("rotary",), spec.dtype, sizes, platform)


def preference(spec: RotarySpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`. On H200 ours is as fast as the compiled reference (1.01 to 1.04 x,
    BENCHMARKS.md), which fuses with what stands around it.
    """
    return ("reference",) if platform.vendor == "cpu" else ("reference", "triton")
