"""The section of Zamba2's shared attention block. No torch here."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import Problem, Width
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.attention import AttentionSection
from llmtrain.models.sections.dense import MLPSection


class SharedAttentionBlock(AttentionSection):
    """Zamba2's shared transformer block (Glorioso et al., arXiv:2411.15242).

    Reads concat(hidden, embedding) of width 2 * d_model. Written `s+m` in the layer pattern: its output,
    through a linear layer of that invocation's own, is added to the input of block m before m's norm.
    head_dim defaults to 2 * d_model / n_heads and softmax_scale to (head_dim / 2)^-0.5.
    """

    implementation: ClassVar[str] = "llmtrain.models.mixers.shared_attention:SharedAttention"

    type: Literal["shared_attention"]
    n_shared: Width = 1
    """Copies of the block, used in turn (ABAB)."""
    mlp: MLPSection = Field()
    adapter_rank: Width | None = None
    """Rank of each invocation's low-rank adapter on the MLP's first projection."""
    attn_adapter_rank: Width | None = None
    """Rank of each invocation's low-rank adapters on queries, keys and values."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        text = (
            "a shared block feeds a layer and adds nothing to the residual stream itself; set it in the layer's block"
        )
        for field, plain in (("parallel", False), ("residual_multiplier", 1), ("input_multiplier", 1)):
            if getattr(self, field) != plain:
                yield Problem(field, getattr(self, field), text)
        if self.output_gate and self.attn_adapter_rank is not None:
            yield self.problem_at("attn_adapter_rank", "adapts no output gate; set output_gate: false")

    @property
    def shared_copies(self) -> int:
        return self.n_shared

    def input_width(self, d_model: int) -> int:
        return 2 * d_model

    def default_scale(self, head_dim: int) -> float:
        return (head_dim / 2) ** -0.5

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Tensors of an attention block, and the input of the linear layer behind the shared block."""
        return super().saved_bytes(d_model, width) + SavedBytes(width * d_model)
