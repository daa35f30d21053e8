"""The section of an attention block, and the fields that a shared one has too. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import PositiveInt, Problem, free
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Kernel
from llmtrain.models.sections.layers import NoPosition, Position

AttentionBackend = Literal[
    "auto",
    "reference",
    "sdpa",
    "sdpa:flash",
    "sdpa:cudnn",
    "sdpa:efficient",
    "sdpa:cpu",
    "flex",
    "triton",
    "flash_attn",
]


class AttentionSection(BlockSection):
    """Settings that attention blocks and shared ones have in common."""

    n_heads: PositiveInt
    n_kv_heads: PositiveInt | None = None
    """Key/value heads: n_heads (MHA, the default), 1 (MQA), or a divisor of n_heads (GQA)."""
    head_dim: PositiveInt | None = None
    """Default: the attention input's width / n_heads."""
    position: Position = NoPosition()
    qk_norm: Literal["none", "head", "full"] = "none"
    """Normalise queries and keys per head, or over all heads at once (MPT's qk_ln)."""
    clip_qkv: Annotated[float, Field(gt=0)] | None = None
    """Clamp the fused projection's output to [-clip_qkv, clip_qkv]."""
    sliding_window: PositiveInt | None = None
    """Each token sees itself and the sliding_window - 1 tokens before it."""
    softcap: Annotated[float, Field(gt=0)] | None = None
    """softcap * tanh(score / softcap) before the softmax."""
    softmax_scale: Annotated[float, Field(gt=0)] | None = None
    """Default: head_dim^-0.5."""
    qkv_bias: bool = False
    out_bias: bool = False
    backend: AttentionBackend = free("auto")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    def problems(self) -> Iterator[Problem]:
        if self.n_heads % self.kv_heads:
            yield Problem("n_kv_heads", self.n_kv_heads, f"must divide n_heads ({self.n_heads})")
        if self.position.type == "rotary" and self.head_dim and self.head_dim % 2:
            yield Problem("head_dim", self.head_dim, "rotary positions need an even head_dim")

    def default_scale(self, head_dim: int) -> float:
        return head_dim**-0.5

    def spec(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> AttentionSpec:
        """The kernel's view of the block."""
        head_dim = self.head_dim or self.input_width(d_model) // self.n_heads
        return AttentionSpec(
            n_heads=self.n_heads,
            n_kv_heads=self.kv_heads,
            head_dim=head_dim,
            scale=self.softmax_scale or self.default_scale(head_dim),
            alibi_max_bias=self.position.max_bias if self.position.type == "alibi" else None,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            dtype=dtype,
            documents=documents,
        )

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("attention", self.spec(d_model, dtype, documents), self.backend)

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        width = self.input_width(d_model)
        if self.head_dim is None and width % self.n_heads:
            text = "2 * d_model" if width != d_model else "d_model"
            yield Problem("n_heads", self.n_heads, f"must divide {text} = {width}, or head_dim must be given")
        elif self.head_dim is None and self.position.type == "rotary" and (width // self.n_heads) % 2:
            yield Problem(
                "n_heads", self.n_heads, f"gives head_dim {width // self.n_heads}; rotary positions need an even one"
            )

    def describe(self, d_model: int) -> str:
        head_dim = self.head_dim or self.input_width(d_model) // self.n_heads
        kv = "" if self.kv_heads == self.n_heads else f" ({self.kv_heads} key/value heads)"
        position = "" if self.position.type == "none" else f", {self.position.type}"
        return f"{super().describe(d_model)}: {self.n_heads} heads x {head_dim}{kv}{position}"

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, q, k, v, and attention's output with its log-sum-exps.

        Selective checkpointing keeps every second matrix product's output: wqkv's, not wo's.
        """
        spec = self.spec(d_model)
        q, kv = spec.n_heads * spec.head_dim, 2 * spec.n_kv_heads * spec.head_dim
        attention = width * q + 4 * spec.n_heads
        kept = attention if registry.saved_ops("attention", self.backend) else 0
        return SavedBytes(width * (2 * self.input_width(d_model) + q + kv) + attention, width * (q + kv) + kept)


class AttentionBlock(AttentionSection):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.attention:Attention"

    type: Literal["attention"]
