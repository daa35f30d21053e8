"""Specification of an attention operation, and the backends that can serve it. No torch here.

A refusal says why a backend cannot serve, and names no other: registry.refusal adds those that can. With `platform=None`
only reasons that hold on every machine are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmtrain.kernels import refusals
from llmtrain.kernels.platform import Platform, float8_refusal

_FLASH3 = "flash-attn-3 (from its sources, folder hopper)"

FLOAT8_HEAD_DIMS = (64, 128)

STORED_BYTES, STORED_FROM = 1 << 30, 8192
"""Most bytes of scores' gradients that the Triton backend's backward pass stores at a time (stored_dscores.py), and the shortest
sequences for which it does, by any row."""


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention of one layer: everything that is fixed when the model is built.

    Score of query i on key j <= i: softcap(scale * q_i . k_j) - slope_head * (i - j), where the
    softcap is c * tanh(. / c), and the last term is ALiBi's.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    alibi_max_bias: float | None = None
    sliding_window: int | None = None
    """Tokens a query sees, itself included."""
    softcap: float | None = None
    dtype: str = "bfloat16"
    """Dtype of queries, keys and values."""
    documents: bool = False
    """Sequences may hold several documents, which do not see each other."""
    lower_right: bool = False
    """Queries may be the last tokens alone of the sequence that the keys are: the causal mask is aligned to its lower right."""
    heads_of: tuple[int, int] | None = None
    """(first, all): the heads are those from `first` on of a layer's, the others being other ranks': ALiBi's slopes are by
    place. None: all."""
    sinks: bool = False
    """Each head has one more logit, of no key and no value, in the softmax (gpt-oss): kernels take these logits, [n_heads]."""
    value_dim: int | None = None
    """Width of a head's values and output; None: head_dim, which is that of queries and keys."""

    @property
    def plain(self) -> bool:
        """Nothing beyond causal softmax(scale * q k^T) over a whole sequence."""
        return not self.lower_right and self.only_causal

    @property
    def only_causal(self) -> bool:
        """Nothing beyond causal softmax(scale * q k^T), of whole sequences or of their suffixes."""
        beyond = (self.alibi_max_bias, self.sliding_window, self.softcap)
        return not self.documents and not self.sinks and all(value is None for value in beyond)

    @property
    def width(self) -> int:
        """Channels of a head's values."""
        return self.value_dim or self.head_dim

    @property
    def slopes(self) -> Sequence[float] | None:
        """ALiBi's slope of each head; None without ALiBi."""
        if self.alibi_max_bias is None:
            return None
        first, count = self.heads_of or (0, self.n_heads)
        return alibi_slopes(count, self.alibi_max_bias)[first : first + self.n_heads]

    def within(self, seq_len: int) -> AttentionSpec:
        """The same function of sequences up to this length: without a window that hides nothing of them."""
        hides = self.sliding_window is not None and self.sliding_window < seq_len
        return self if hides or self.sliding_window is None else replace(self, sliding_window=None)

    def pairs(self, seq_len: int, causal: bool) -> int:
        """Query-key pairs of one sequence: all T^2, or with `causal` those that are not masked."""
        if not causal:
            return seq_len * seq_len
        window = min(self.sliding_window or seq_len, seq_len)
        return window * (window + 1) // 2 + (seq_len - window) * window

    def workspace_bytes(self, seq_len: int) -> int:
        """Most bytes that a backward pass takes beside its inputs and gradients, whatever the batch."""
        plain = self.sliding_window is None and not (self.documents or self.sinks or self.value_dim)
        plain = plain and self.dtype != "float32"
        return STORED_BYTES if plain and self.head_dim > 128 and seq_len >= STORED_FROM else 0

    def flops(self, seq_len: int, causal: bool) -> int:
        """Forward FLOP of one sequence: q k^T and p v, 2 per channel, pair and head."""
        return 2 * self.pairs(seq_len, causal) * self.n_heads * (self.head_dim + self.width)


def alibi_slopes(n_heads: int, max_bias: float) -> Sequence[float]:
    """ALiBi slopes per head (Press et al., arXiv:2108.12409), in MPT's order for any number of heads.

    For n = 2^k heads: 2^(-max_bias * i / n), i = 1..n. Otherwise the slopes of the next power of two,
    every second one first (i = 2, 4, ..., then 1, 3, ...), cut to n_heads.
    """
    n = 1 << (n_heads - 1).bit_length()
    slopes = [2.0 ** (-max_bias * i / n) for i in range(1, n + 1)]
    return slopes if n == n_heads else (slopes[1::2] + slopes[::2])[:n_heads]


def refuse_sdpa_flash(spec: AttentionSpec, platform: Platform | None) -> str | None:
    return _refuse_fused("flash", spec) or _refuse_platform("flash", spec, platform, max_head_dim=256)


def refuse_sdpa_flash3(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if reason := refuse_sdpa_flash(spec, platform) or _refuse_suffix("FlashAttention-3", spec):
        return reason
    if platform is not None and platform.arch != "sm90":
        return f"FlashAttention-3 runs on Hopper (sm90) only, not {platform.arch}"
    return refusals.refuse_package(("flash_attn_interface",), _FLASH3, platform)


def refuse_sdpa_flash4(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if reason := refuse_sdpa_flash(spec, platform) or _refuse_suffix("FlashAttention-4", spec):
        return reason
    if platform is not None and (platform.vendor != "nvidia" or platform.arch[:-1] not in ("sm9", "sm10")):
        return f"FlashAttention-4 runs on Hopper and data-center Blackwell (sm90, sm100), not {platform.arch}"
    if platform is not None and platform.arch != "sm90" and 128 < spec.head_dim < 256:
        return f"FlashAttention-4 takes a head_dim up to 128, or 256, on Blackwell, not {spec.head_dim}"
    return refusals.refuse_package(("flash_attn.cute",), "flash-attn-4", platform)


def refuse_sdpa_cudnn(spec: AttentionSpec, platform: Platform | None) -> str | None:
    """Wide heads as torch 2.11 has them (check_cudnn_tensor_shapes in sdp_utils.cpp): up to 256 on Hopper alone."""
    if reason := _refuse_fused("cuDNN", spec):
        return reason
    if platform is not None and platform.vendor == "amd":
        return "cuDNN runs on NVIDIA GPUs only"
    if platform is not None and platform.arch != "sm90" and spec.head_dim > 128:
        return (
            f"SDPA's cuDNN kernel takes head_dim up to 256 on Hopper (sm90), up to 128 elsewhere, not {spec.head_dim}"
        )
    return _refuse_platform("cuDNN", spec, platform, max_head_dim=256)


def refuse_sdpa_efficient(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if reason := _refuse_sdpa(replace(spec, value_dim=None)):
        return reason
    if spec.sinks:
        return "memory-efficient attention has no sinks"
    if platform is not None and platform.vendor == "cpu":
        return "memory-efficient attention needs a GPU"
    for width in (spec.head_dim, spec.width):
        if width % 8:
            return f"memory-efficient attention needs a head_dim divisible by 8, not {width}"
    return None


def refuse_sdpa_cpu(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if reason := _refuse_sdpa(spec):
        return reason
    if spec.value_dim is not None:
        return "SDPA's kernel for CPUs has no values of another width than keys"
    if platform is not None and platform.vendor != "cpu":
        return "runs on CPUs only"
    return None


def refuse_flex(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if min(spec.head_dim, spec.width) < 16:
        return f"FlexAttention needs head_dim >= 16, not {min(spec.head_dim, spec.width)}"
    if platform is not None and platform.vendor == "cpu":
        return "FlexAttention has no backward pass on CPUs"
    return None


def refuse_varlen(spec: AttentionSpec, platform: Platform | None) -> str | None:
    """PyTorch's FlashAttention-2 in its form for documents, which has windows too; `sdpa:flash` is the form without either."""
    missing = [name for name, value in (("ALiBi", spec.alibi_max_bias), ("softcap", spec.softcap)) if value is not None]
    missing += _unserved(spec)
    if missing:
        return f"PyTorch's varlen attention has no {' or '.join(missing)}"
    if reason := _refuse_suffix("varlen", spec):
        return reason
    if spec.head_dim % 8:
        return f"PyTorch's varlen attention needs a head_dim divisible by 8, not {spec.head_dim}"
    return _refuse_platform("varlen", spec, platform, max_head_dim=256)


def refuse_triton(spec: AttentionSpec, platform: Platform | None) -> str | None:
    """Reason that holds for our kernels on whole sequences and on one new token alike."""
    for width in (spec.head_dim, spec.width):
        if width % 8 or width > 256:
            return f"the Triton kernel takes a head_dim that is a multiple of 8 up to 256, not {width}"
    return refusals.refuse_triton(spec.dtype, platform)


def refuse_triton_step(spec: AttentionSpec, platform: Platform | None) -> str | None:
    if spec.value_dim is not None:
        return "the Triton kernel for one token takes values as wide as keys"
    return refuse_triton(spec, platform)


def refuse_triton_sequence(spec: AttentionSpec, platform: Platform | None) -> str | None:
    kernels = ("attention.forward", "attention.dq", "attention.dkdv")
    sizes = {"head_dim": spec.head_dim}
    if spec.lower_right and not replace(spec, softcap=None, sinks=False).only_causal:
        return (
            "the Triton kernel takes ALiBi, windows and documents of whole sequences, not of a part of the queries "
            "(train.parallel.context)"
        )
    return refuse_triton(spec, platform) or refusals.refuse_untuned(kernels, spec.dtype, sizes, platform)


def refuse_triton_float8(spec: AttentionSpec, platform: Platform | None) -> str | None:
    """Our kernels with products in float8 (float8.py)."""
    missing = _unserved(spec) + ["softcap"] * (spec.softcap is not None)
    if missing:
        return f"attention in float8 has no {' or '.join(missing)}"
    if reason := _refuse_suffix("attention in float8", spec):
        return reason
    if spec.head_dim not in FLOAT8_HEAD_DIMS:
        return f"attention in float8 takes head_dim 64 or 128, not {spec.head_dim}"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"attention in float8 takes bfloat16 or float16, not {spec.dtype}; use precision amp_bf16"
    if platform is not None and (reason := float8_refusal(platform)):
        return reason
    kernels = tuple(f"attention.float8_{kernel}" for kernel in ("forward", "dq", "dkdv"))
    sizes = {"head_dim": spec.head_dim}
    return refuse_triton(spec, platform) or refusals.refuse_untuned(kernels, spec.dtype, sizes, platform)


def refuse_flash_attn(spec: AttentionSpec, platform: Platform | None) -> str | None:
    """The package, which has ALiBi, windows and softcaps where PyTorch's copy of it has none."""
    if spec.documents:
        return "flash_attn is called with whole sequences, which keeps no documents apart"
    if missing := _unserved(spec):
        return f"flash_attn is called without {' or '.join(missing)}"
    if reason := _refuse_suffix("flash_attn", spec):
        return reason
    if spec.head_dim % 8 or spec.head_dim > 256:
        return f"flash_attn takes a head_dim that is a multiple of 8 up to 256, not {spec.head_dim}"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"flash_attn takes bfloat16 or float16, not {spec.dtype}; use precision amp_bf16"
    return refusals.refuse_package(("flash_attn",), "flash-attn", platform)


def preference(spec: AttentionSpec, platform: Platform) -> tuple[str, ...]:
    """Backends in order, for `auto` and `sdpa`, where no measured cell applies to the spec (attention/measured.py); public ones
    first.

    cuDNN leads on Hopper and later, FA2 where cuDNN is untuned or absent; FlexAttention fuses the change of scores and skips
    masked tiles. On Hopper varlen, which is FA2, is ahead of Flex in all cells of the measured grid with documents or with a
    window at a head_dim above 128, and behind it in most others. Ours has kernels for all of it, and sdpa:efficient reads a
    [heads, T, T] bias from memory. On CPUs, SDPA's own kernel never stores the T x T scores.
    """
    if platform.vendor == "cpu":
        return ("sdpa:cpu", "reference")
    if platform.arch == "sm90" and spec.dtype != "float32":
        masked = ("varlen", "flex") if spec.documents or spec.head_dim > 128 else ("flex", "varlen")
        return ("sdpa:cudnn", "sdpa:flash", *masked, "triton", "sdpa:efficient", "reference")
    if not spec.plain:
        return ("flex", "varlen", "sdpa:efficient", "reference", "triton")
    if platform.vendor == "nvidia" and int(platform.arch.removeprefix("sm")) >= 90:
        return ("sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "flex", "reference", "triton")
    return ("sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "flex", "reference", "triton")


def _refuse_sdpa(spec: AttentionSpec) -> str | None:
    """Reason that holds for every kernel behind PyTorch's SDPA, even with a bias."""
    missing = "softcap" if spec.softcap is not None else "document mask" if spec.documents else None
    missing = missing or ("sinks" if spec.sinks and not _takes_sinks_behind(spec) else None)
    return missing and f"PyTorch's SDPA has no {missing}"


def _takes_sinks_behind(spec: AttentionSpec) -> bool:
    """True where sinks can be added to a kernel's output, by its log-sum-exp (suffix.py)."""
    return replace(spec, sinks=False).only_causal and spec.value_dim is None


def _unserved(spec: AttentionSpec) -> list[str]:
    """Features that kernels for queries, keys and values of one width, and nothing else, are without."""
    return ["sinks"] * spec.sinks + ["values of another width than keys"] * (spec.value_dim is not None)


def _refuse_fused(kernel: str, spec: AttentionSpec) -> str | None:
    """Reason that holds for the flash and cuDNN kernels behind PyTorch's SDPA on every machine."""
    missing = [
        name
        for name, value in (
            ("ALiBi", spec.alibi_max_bias),
            ("sliding_window", spec.sliding_window),
            ("softcap", spec.softcap),
            ("document mask", spec.documents or None),
        )
        if value is not None
    ]
    missing += [one for one in _unserved(spec) if one != "sinks" or kernel != "cuDNN"]
    if missing:
        return f"SDPA's {kernel} kernel has no {' or '.join(missing)}"
    if spec.head_dim % 8:
        return f"SDPA's {kernel} kernel needs a head_dim divisible by 8, not {spec.head_dim}"
    return None


def _refuse_suffix(kernel: str, spec: AttentionSpec) -> str | None:
    if not spec.lower_right:
        return None
    return f"{kernel} is called with whole sequences, not a part of the queries (train.parallel.context)"


def _refuse_platform(kernel: str, spec: AttentionSpec, platform: Platform | None, max_head_dim: int) -> str | None:
    if spec.head_dim > max_head_dim:
        return f"SDPA's {kernel} kernel takes head_dim up to {max_head_dim}, not {spec.head_dim}"
    if platform is None:
        return None
    if platform.vendor == "cpu":
        return f"SDPA's {kernel} kernel needs a GPU"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"SDPA's {kernel} kernel needs bfloat16, not {spec.dtype}; use precision amp_bf16"
    return None
