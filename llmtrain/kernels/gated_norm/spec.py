"""Specification of Mamba-2's output norm, and its backends. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton


@dataclass(frozen=True)
class GatedNormSpec:
    """RMSNorm by groups of neighbouring channels, with a SiLU gate: norm(x silu(z)) w, or norm(x) w silu(z)."""

    dim: int
    n_groups: int
    eps: float
    norm_before_gate: bool = False
    dtype: str = "bfloat16"

    @property
    def group_size(self) -> int:
        return self.dim // self.n_groups


def refuse_triton_rows(spec: GatedNormSpec, platform: Platform | None) -> str | None:
    if spec.group_size > 8192:
        return f"our Triton norm takes groups of up to 8192 channels, not {spec.group_size}"
    return refuse_triton(spec.dtype, platform)


def refuse_mamba_ssm(spec: GatedNormSpec, platform: Platform | None) -> str | None:
    return refuse_package(("mamba_ssm",), "mamba-ssm", platform)


def preference(spec: GatedNormSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`.

    Measured on H200 (BENCHMARKS.md, 16 bits, forward and backward of 16,384 tokens x 5,120 channels): ours 0.36 ms, the
    compiled reference 0.66. Ours is not measured elsewhere.
    """
    if platform.vendor == "cpu":
        return ("reference",)
    measured = platform.arch == "sm90" and spec.dtype != "float32"
    return ("triton", "reference") if measured else ("reference", "triton")
