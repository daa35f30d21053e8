"""Reasons to refuse that several operations share. No torch here."""

from __future__ import annotations

from llmtrain.kernels.platform import Platform

_TRITON_DTYPES = ("bfloat16", "float16", "float32")


def refuse_triton(dtype: str, platform: Platform | None) -> str | None:
    """What none of our Triton kernels serves."""
    if dtype not in _TRITON_DTYPES:
        return f"our Triton kernels take {', '.join(_TRITON_DTYPES)}, not {dtype}; use reference"
    if platform is not None and platform.vendor == "cpu":
        return "our Triton kernels need a GPU; use reference"
    return None
