"""The section of a compressed convolutional attention block. No torch here."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from llmtrain.config.base import Problem, Width
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.attention import AttentionSection
from llmtrain.models.sections.block import Divided


class CompressedAttentionBlock(AttentionSection):
    """Pre-norm block of compressed convolutional attention (Zyphra's CCA, arXiv:2510.04476): queries and keys of few channels are
    mixed by two short causal convolutions and brought to one length, half of the values' channels are the previous token's."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.compressed_attention:CompressedAttention"

    type: Literal["compressed_attention"]
    d_conv: Width = 2
    """Kernel width of the causal depthwise convolution of queries and keys."""
    d_head_conv: Width = 2
    """Kernel width of the causal convolution behind it, which mixes the channels of each head."""

    @property
    def reach(self) -> int:
        """Tokens before a token that the convolutions see."""
        return self.d_conv + self.d_head_conv - 2

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for name, without in (("qk_norm", "none"), ("clip_qkv", None), ("output_gate", False)):
            if (found := getattr(self, name)) != without:
                shown = "null" if without is None else str(without).lower()
                yield Problem(name, found, f"is not for compressed_attention; set it to {shown}")

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        yield from super().width_problems(d_model)
        head_dim = self.head_dim or d_model // self.n_heads
        if self.kv_heads * head_dim % 2:
            text = f"gives values an odd number of channels ({self.kv_heads} x {head_dim}), of which half are delayed"
            yield self.problem_at("head_dim", text)

    def divided(self, d_model: int) -> list[Divided]:
        """Heads of keys are not repeated: each reads all queries that it serves."""
        return [Divided("n_heads", self.n_heads), Divided("n_kv_heads", self.kv_heads)]

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Also queries, keys and values that the convolutions see before each segment."""
        spec = self.spec(d_model)
        channels = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
        ends = 2 * (context - 1) * width * max(self.reach, 1) * channels
        return super().gathered_bytes(d_model, width, seq_len, context) + ends

    def describe(self, d_model: int) -> str:
        return f"{super().describe(d_model)}, convolutions of {self.d_conv} and {self.d_head_conv}"

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Bytes of attention, and of the convolutions' inputs, and of queries and keys as they are brought to one length."""
        spec = self.spec(d_model)
        return super().saved_bytes(d_model, width) + SavedBytes(
            (4 * width + 4) * (spec.n_heads + spec.n_kv_heads) * spec.head_dim
        )
