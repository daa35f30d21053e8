"""Specification of a feed-forward layer of experts, behind its router, as one operation. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import DTYPES, Platform
from llmtrain.kernels.refusals import refuse_triton

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
_ROW_BYTES = 16
FLOAT8_MULTIPLE = 16
_WITHOUT_HOST = ("sm90", "sm100")
"""Architectures on which PyTorch's grouped product of bf16 does not wait for the host."""


@dataclass(frozen=True)
class ExpertsSpec:
    """x: [T, d_model], each token through top_k of n_experts: w_in [n_experts, d_in, d_model], the activation, w_out
    [n_experts, d_model, d_ff]. activation: as MLPSection.type. bias: both products have one."""

    d_model: int
    d_ff: int
    n_experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False
    dtype: str = "bfloat16"

    @property
    def d_in(self) -> int:
        """Rows of w_in: gate and up, or up alone."""
        return (2 if self.activation in GATED else 1) * self.d_ff


def refuse_grouped_mm(spec: ExpertsSpec, platform: Platform | None) -> str | None:
    size = DTYPES.get(spec.dtype)
    if size is None:
        return f"torch.nn.functional.grouped_mm takes {', '.join(DTYPES)}, not {spec.dtype}"
    for name, width in (("d_model", spec.d_model), ("d_ff", spec.d_ff)):
        if width * size % _ROW_BYTES:
            each = _ROW_BYTES // size
            return (
                f"torch.nn.functional.grouped_mm needs rows of whole {_ROW_BYTES} bytes, and {name} = {width} are {width * size}; "
                f"use a multiple of {each}"
            )
    if platform is not None and platform.vendor != "cpu":
        if platform.arch not in _WITHOUT_HOST:
            return f"torch.nn.functional.grouped_mm waits for the host on {platform.arch}, in every layer"
        if spec.dtype != "bfloat16":
            return f"torch.nn.functional.grouped_mm waits for the host with {spec.dtype}, in every layer; it does not with bfloat16"
    return None


def refuse_triton_rows(spec: ExpertsSpec, platform: Platform | None) -> str | None:
    if spec.bias:
        return "our Triton kernels have no biases of experts"
    if spec.activation == "swiglu_clamped":
        return "our Triton kernels have no activation swiglu_clamped"
    return refuse_triton(spec.dtype, platform)


def refuse_float8(spec: ExpertsSpec) -> str | None:
    """Reason why products of experts are not in float8 (train.float8.experts)."""
    if reason := refuse_triton_rows(spec, None):
        return reason
    for name, width in (("d_model", spec.d_model), ("d_ff", spec.d_ff)):
        if width % FLOAT8_MULTIPLE:
            return f"products in float8 take widths that are multiples of {FLOAT8_MULTIPLE}, and {name} of experts is {width}"
    return None


def preference(spec: ExpertsSpec, platform: Platform) -> tuple[str, ...]:
    """Backends for `auto`: ours took 0.58 to 0.74 of grouped_mm's time on an H100 (benchmarks/results/kernels)."""
    return ("triton", "grouped_mm", "reference")
