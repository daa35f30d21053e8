"""Specification of the short causal convolution in front of Mamba-2's scan, and its backends. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.refusals import refuse_package, refuse_triton


@dataclass(frozen=True)
class Conv1dSpec:
    """Depthwise causal convolution along the sequence, followed by SiLU."""

    channels: int
    width: int
    """Taps per channel: a token sees itself and the width - 1 before it."""
    dtype: str = "bfloat16"
    documents: bool = False
    """Sequences may hold several documents; taps do not reach from one into another."""

    def flops(self, seq_len: int) -> int:
        """Forward FLOP of one sequence: a multiply and an add per tap."""
        return 2 * seq_len * self.channels * self.width


def refuse_aten(spec: Conv1dSpec, platform: Platform | None) -> str | None:
    return "F.conv1d keeps no documents apart" if spec.documents else None


def refuse_triton_sequence(spec: Conv1dSpec, platform: Platform | None) -> str | None:
    if spec.width > 4:
        return f"our Triton convolution takes a width up to 4, not {spec.width}"
    return refuse_triton(spec.dtype, platform)


def refuse_causal_conv1d(spec: Conv1dSpec, platform: Platform | None) -> str | None:
    if not 2 <= spec.width <= 4 or spec.channels % 8:
        return (
            f"causal_conv1d takes a width of 2 to 4 and channels that are a multiple of 8, not {spec.width} and "
            f"{spec.channels}"
        )
    return refuse_package(("causal_conv1d", "causal_conv1d_cuda"), "causal-conv1d", platform)


def preference(spec: Conv1dSpec, platform: Platform) -> tuple[str, ...]:
    """Backends from fastest to slowest, for `auto`.

    Measured on H200 (BENCHMARKS.md, 16 bits, forward and backward of 16,384 tokens x 5,376 channels): ours 0.30 ms, the
    compiled reference 1.4, F.conv1d with its transposes 3.3. Ours is not measured elsewhere. Run eagerly on a CPU, oneDNN's
    convolution takes 0.6 x the time of the reference (15 against 26 ms forward and backward, 2048 tokens x 640 channels, one
    core).
    """
    if platform.vendor == "cpu":
        return ("aten", "reference")
    measured = platform.arch == "sm90" and spec.dtype != "float32"
    return ("triton", "reference", "aten") if measured else ("reference", "triton", "aten")
