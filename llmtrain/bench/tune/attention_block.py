"""Tuning of attention at the exact features of a model's block; `attention` has the general ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from llmtrain.bench.attention_shape import AttentionShape
from llmtrain.bench.tune import attention
from llmtrain.kernels.attention.spec import AttentionSpec

Problem = attention.Problem


@dataclass(frozen=True)
class Case(attention.Case):
    """variant: names of the features, joined by `+`, as rows of the tuning table have them."""

    alibi_max_bias: float | None = None
    window: int | None = None
    softcap: float | None = None
    documents: bool = False

    def __post_init__(self) -> None:
        """Nothing to check: the features come from a config."""

    @property
    def spec(self) -> AttentionSpec:
        base = replace(self, variant="plain") if self.variant != "plain" else self
        return replace(
            super(Case, base).spec,
            alibi_max_bias=self.alibi_max_bias,
            sliding_window=self.window,
            softcap=self.softcap,
        )

    def exact(self, qkv: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        """The same as of attention.Case, in less memory: with one key head, all scores of its query heads do not fit."""
        return AttentionShape(replace(self.spec, documents=self.documents), self.seq_len, self.batch).exact(qkv, dout)

    @property
    def packed(self) -> bool:
        return self.documents


def variant_of(spec: AttentionSpec) -> str:
    """Name of a spec's features, as the kernels ask for rows."""
    named = {
        "alibi": spec.alibi_max_bias is not None,
        "documents": spec.documents,
        "softcap": spec.softcap is not None,
        "window": spec.sliding_window is not None,
    }
    return "+".join(name for name, has in named.items() if has) or "plain"
