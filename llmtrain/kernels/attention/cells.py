"""Cells of measured attention, and their rows. No torch here."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from llmtrain.kernels.attention.spec import AttentionSpec


def _none_if_empty(text: object) -> object:
    return None if text == "" else text


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Cell:
    """One layer's attention at one length. window: None: none."""

    dtype: Annotated[str, Field(pattern="^(bfloat16|float16|float32)$")]
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    alibi: bool
    softcap: bool
    documents: bool
    window: Annotated[PositiveInt | None, BeforeValidator(_none_if_empty)]
    seq_len: PositiveInt

    @classmethod
    def of(cls, spec: AttentionSpec, seq_len: int) -> Cell:
        window = None if spec.sliding_window is None else min(spec.sliding_window, seq_len)
        return cls(
            dtype=spec.dtype, n_heads=spec.n_heads, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim,
            alibi=spec.alibi_max_bias is not None, softcap=spec.softcap is not None, documents=spec.documents,
            window=window, seq_len=seq_len,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.n_heads // self.n_kv_heads

    @property
    def features(self) -> frozenset[str]:
        has = {"alibi": self.alibi, "softcap": self.softcap, "documents": self.documents, "window": self.window}
        return frozenset(name for name in has if has[name])

    @property
    def label(self) -> str:
        words = ["documents"] * self.documents + ["ALiBi"] * self.alibi + ["softcap"] * self.softcap
        words += [f"window {self.window}"] * (self.window is not None)
        return f"{self.n_heads} on {self.n_kv_heads} x {self.head_dim}, {', '.join(words) or 'plain'}, T={self.seq_len}"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Row(Cell):
    """The times of one backend: medians of the device's own time, with a cold L2 cache."""

    backend: str
    forward_ms: PositiveFloat
    backward_ms: PositiveFloat
    device: str
    date: str
    commit: str

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def cell(self) -> Cell:
        return Cell(**{field.name: getattr(self, field.name) for field in fields(Cell)})
