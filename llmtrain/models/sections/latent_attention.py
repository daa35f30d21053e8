"""The section of a latent attention block. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import PositiveFloat, Problem, Width, free
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.attention import AttentionBackend
from llmtrain.models.sections.block import BlockSection, Divided, Kernel
from llmtrain.models.sections.layers import NoPosition, NormConfig, RotaryPosition


class LatentAttentionBlock(BlockSection):
    """Attention whose keys and values are made of few channels per token, all that decoding keeps of it (MLA, DeepSeek-V2,
    arXiv:2405.04434): of a normalised latent, by head, and of rope_dim channels that are each head's last."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.latent_attention:LatentAttention"

    type: Literal["latent_attention"]
    n_heads: Width
    kv_rank: Width
    """Channels of the latent of keys and values."""
    q_rank: Width | None = None
    """Channels of a normalised latent of the queries; default: none, queries are made of the input."""
    nope_dim: Width = 128
    """Channels of a head's queries and keys without positions."""
    rope_dim: Width = 64
    """Channels of a head's queries and keys that are rotated; of keys the same for all heads."""
    value_dim: Width = 128
    """Channels of a head's values."""
    position: Annotated[NoPosition | RotaryPosition, Field(discriminator="type")] = NoPosition()
    """none: the rope_dim channels are there, and not rotated (Kimi Linear)."""
    latent_eps: PositiveFloat = 1e-6
    """Of the RMSNorms of the latents."""
    softmax_scale: PositiveFloat | None = None
    """Default: (nope_dim + rope_dim)^-0.5."""
    latent_bias: bool = False
    """Of the projections of the input to latents."""
    out_bias: bool = False
    backend: AttentionBackend = free("auto")

    @property
    def head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Channels per token that decoding keeps."""
        return self.kv_rank + self.rope_dim

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.position.type == "rotary" and self.rope_dim % 2:
            yield self.problem_at("rope_dim", "rotary positions need an even number")
        if self.position.type == "rotary" and self.position.fraction != 1:
            yield self.problem_at("position.fraction", "rope_dim says which channels are rotated; use 1")

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        return super().function(d_model, norm) | {"softmax_scale": self.spec().scale}

    def spec(self, dtype: str = "bfloat16", documents: bool = False) -> AttentionSpec:
        """The kernel's view of the block, with keys and values made."""
        return AttentionSpec(
            n_heads=self.n_heads,
            n_kv_heads=self.n_heads,
            head_dim=self.head_dim,
            scale=self.softmax_scale or self.head_dim**-0.5,
            dtype=dtype,
            documents=documents,
            value_dim=None if self.value_dim == self.head_dim else self.value_dim,
        )

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("attention", self.spec(dtype, documents), self.backend)

    def kernels(
        self, d_model: int, norm: NormConfig, dtype: str = "bfloat16", documents: bool = False
    ) -> Iterator[Kernel]:
        yield from super().kernels(d_model, norm, dtype, documents)
        if self.position.type == "rotary":
            yield Kernel("rotary", RotarySpec(self.rope_dim, dtype), self.backend)

    def segments_refusal(self, d_model: int, documents: bool = False) -> str | None:
        spec = replace(self.spec(documents=documents), lower_right=True)
        return registry.refusal("attention", self.backend, spec)

    def divided(self, d_model: int) -> list[Divided]:
        return [Divided("n_heads", self.n_heads)]

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Latents of the others' segments, and keys and values that are made of the tokens before the own ones."""
        made = self.n_heads * (self.head_dim + self.value_dim)
        return width * (self.latent_dim * (1 - 1 / context) + made * (1 - 1 / (2 * context))) * seq_len

    def describe(self, d_model: int) -> str:
        position = ", rotary" if self.position.type == "rotary" else ""
        latents = f"latents {self.kv_rank} + {self.rope_dim}" + (f", of queries {self.q_rank}" if self.q_rank else "")
        return f"{super().describe(d_model)}: {self.n_heads} heads x {self.head_dim} (values {self.value_dim}), {latents}{position}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        queries = {"wq": self.n_heads * self.head_dim} if self.q_rank is None else {"wq_a": self.q_rank}
        return queries | {"wkv_a": self.latent_dim}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, latents and their norms, q, k, v, and attention's output with its log-sum-exps."""
        attention = width * self.n_heads * self.value_dim + 4 * self.n_heads
        kept = attention if registry.saved_ops("attention", self.backend) else 0
        latents = 2 * (self.kv_rank + (self.q_rank or 0)) + self.rope_dim
        made = self.n_heads * (2 * self.head_dim + self.value_dim)
        return SavedBytes(width * (2 * d_model + latents + made) + attention, kept)
