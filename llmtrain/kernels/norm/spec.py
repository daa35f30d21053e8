"""Specification of the norm of a residual stream, and its backends. No torch here."""

from dataclasses import dataclass
from typing import Literal

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_triton, refuse_untuned

WIDEST = 8192


@dataclass(frozen=True)
class NormSpec:
    """LayerNorm (arXiv:1607.06450) or RMSNorm (arXiv:1910.07467) over `dim` channels, of x or of a sum x + delta."""

    dim: int
    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    bias: bool = False
    eps: float = 1e-5
    dtype: str = "bfloat16"


def refuse_triton_rows(spec: NormSpec, platform: Platform | None) -> str | None:
    if spec.dim > WIDEST:
        return f"our Triton norm takes up to {WIDEST} channels, not {spec.dim}"
    rows = ("norm.forward", "norm.backward")
    return refuse_triton(spec.dtype, platform) or refuse_untuned(rows, spec.dtype, {"dim": spec.dim}, platform)


FASTER = {"rmsnorm": ((1536, 8192),), "layernorm": ((1536, 3072), (5120, 6144))}
"""Widths between which ours was faster than the compiled reference at every width measured, in bf16 on an H200 (rows `norm` of
the measured grid: x + delta, forward and backward of 16,384 tokens at 768 to 8,192 channels): 1.08 to 1.63 x. Outside it was 0.92
to 1.04 x. Norms without delta were timed in whole training steps alone."""


def preference(spec: NormSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`: ours between widths where it was measured to be faster, nowhere else."""
    if platform.vendor == "cpu":
        return ("reference",)
    measured = platform.arch == "sm90" and spec.dtype == "bfloat16"
    faster = any(least <= spec.dim <= most for least, most in FASTER[spec.type])
    return ("triton", "reference") if measured and faster else ("reference", "triton")
