"""Specification of Mamba-2's output norm, and its backends. No torch here."""

from dataclasses import dataclass
from typing import Literal

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton


@dataclass(frozen=True)
class GatedNormSpec:
    """RMSNorm by groups of neighbouring channels, with a gate: norm(x gate(z)) w, or norm(x) w gate(z)."""

    dim: int
    n_groups: int
    eps: float
    norm_before_gate: bool = False
    dtype: str = "bfloat16"
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def group_size(self) -> int:
        return self.dim // self.n_groups


def _refuse_gate(spec: GatedNormSpec) -> str | None:
    return None if spec.gate == "silu" else f"its gate is silu, not {spec.gate}"


def refuse_triton_rows(spec: GatedNormSpec, platform: Platform | None) -> str | None:
    if reason := _refuse_gate(spec):
        return reason
    if spec.group_size > 8192:
        return f"our Triton norm takes groups of up to 8192 channels, not {spec.group_size}"
    return refuse_triton(spec.dtype, platform)


def refuse_mamba_ssm(spec: GatedNormSpec, platform: Platform | None) -> str | None:
    return _refuse_gate(spec) or refuse_package(("mamba_ssm",), "mamba-ssm", platform)


def preference(spec: GatedNormSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`.

    Measured on H200 (BENCHMARKS.md, 16 bits, forward and backward of 16,384 tokens x 5,120 channels): ours 0.36 ms, the
    compiled reference 0.66. Ours is not measured elsewhere.
    """
    if platform.vendor == "cpu":
        return ("reference",)
    measured = platform.arch == "sm90" and spec.dtype != "float32"
    return ("triton", "reference") if measured else ("reference", "triton")
