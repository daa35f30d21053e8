"""Specification of the norm of a residual stream, and its backends. No torch here."""

from __future__ import annotations

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
        return f"our Triton norm takes up to {WIDEST} channels, not {spec.dim}; use reference"
    rows = ("norm.forward", "norm.backward")
    return refuse_triton(spec.dtype, platform) or refuse_untuned(rows, spec.dtype, {"dim": spec.dim}, platform)


def preference(spec: NormSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`.

    Measured on H200 (BENCHMARKS.md, bf16, x + delta, forward and backward of 16,384 tokens) at 2048, 2560 and 4096 channels:
    ours takes 0.61 to 0.93 of the compiled reference's time, but 1.09 for LayerNorm at 4096. So ours is taken between the
    sizes where it was faster, and nowhere else. Norms without delta were timed in whole training steps alone.
    """
    if platform.vendor == "cpu":
        return ("reference",)
    faster = 2048 <= spec.dim <= (4096 if spec.type == "rmsnorm" else 2560)
    measured = platform.arch == "sm90" and spec.dtype == "bfloat16"
    return ("triton", "reference") if measured and faster else ("reference", "triton")
