"""The section of an attention block, and the fields that a shared one has too. No torch here."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

from llmtrain.config.base import PositiveFloat, PositiveInt, Problem, Width, free
from llmtrain.kernels import registry
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Divided, Kernel
from llmtrain.models.sections.layers import NoPosition, NormConfig, Position, RotaryPosition

AttentionBackend = Literal[
    "auto",
    "reference",
    "sdpa",
    "sdpa:flash",
    "sdpa:flash3",
    "sdpa:flash4",
    "sdpa:cudnn",
    "sdpa:efficient",
    "sdpa:cpu",
    "flex",
    "varlen",
    "triton",
    "triton_float8",
    "flash_attn",
]


class AttentionSection(BlockSection):
    """Settings that attention blocks and shared ones have in common."""

    n_heads: Width
    n_kv_heads: Width | None = None
    """Key/value heads: n_heads (MHA, the default), 1 (MQA), or a divisor of n_heads (GQA)."""
    head_dim: Width | None = None
    """Default: the attention input's width / n_heads."""
    position: Position = NoPosition()
    qk_norm: Literal["none", "head", "full"] = "none"
    """Normalise queries and keys per head, or over all heads at once (MPT's qk_ln)."""
    clip_qkv: PositiveFloat | None = None
    """Clamp the fused projection's output to [-clip_qkv, clip_qkv]."""
    sliding_window: PositiveInt | None = None
    """Each token sees itself and the sliding_window - 1 tokens before it."""
    softcap: PositiveFloat | None = None
    """softcap * tanh(score / softcap) before the softmax."""
    softmax_scale: PositiveFloat | None = None
    """Default: head_dim^-0.5."""
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False
    """Multiply each channel of attention's output by the sigmoid of a projection of its input (Qiu et al., arXiv:2505.06708)."""
    sinks: bool = False
    """Each head has one more logit in the softmax, a parameter, by which it can attend to nothing (gpt-oss, arXiv:2508.10925)."""
    backend: AttentionBackend = free("auto")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.n_heads % self.kv_heads:
            yield self.problem_at("n_kv_heads", f"must divide n_heads ({self.n_heads})")
        if self.position.type == "rotary" and self.head_dim:
            if self.position.fraction == 1 and self.head_dim % 2:
                yield self.problem_at("head_dim", "rotary positions need an even head_dim")
            yield from self._fraction_problems(self.position, self.head_dim)

    def _fraction_problems(self, rotary: RotaryPosition, head_dim: int) -> Iterator[Problem]:
        width = rotary.width(head_dim)
        if rotary.fraction != 1 and (width % 2 or not width):
            found = f"rotates {width} of {head_dim} channels of a head; an even number of at least 2 is needed"
            yield Problem("position.fraction", rotary.fraction, found)

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        spec = self.spec(d_model)
        resolved = {"n_kv_heads": spec.n_kv_heads, "head_dim": spec.head_dim, "softmax_scale": spec.scale}
        return super().function(d_model, norm) | resolved

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
            sinks=self.sinks,
        )

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("attention", self.spec(d_model, dtype, documents), self.backend)

    def kernels(
        self, d_model: int, norm: NormConfig, dtype: str = "bfloat16", documents: bool = False
    ) -> Iterator[Kernel]:
        yield from super().kernels(d_model, norm, dtype, documents)
        if self.position.type == "rotary":
            width = self.position.width(self.spec(d_model).head_dim)
            yield Kernel("rotary", RotarySpec(width, dtype), self.backend)

    def segments_refusal(self, d_model: int, documents: bool = False) -> str | None:
        spec = replace(self.spec(d_model, documents=documents), lower_right=True)
        return registry.refusal("attention", self.backend, spec)

    def divided(self, d_model: int) -> list[Divided]:
        return [Divided("n_heads", self.n_heads), Divided("n_kv_heads", self.kv_heads, repeats=True)]

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Keys and values of the others' segments, or of as many tokens at their ends as a window reaches."""
        spec, reach = self.spec(d_model), (self.sliding_window or seq_len) - 1
        tokens = 2 * (context - 1) * min(reach, seq_len / (2 * context))
        return 2 * width * spec.n_kv_heads * spec.head_dim * tokens

    def workspace_bytes(self, d_model: int, width: int, seq_len: int) -> int:
        spec = self.spec(d_model, "bfloat16" if width == 2 else "float32")
        return spec.workspace_bytes(seq_len) if self.backend in ("auto", "triton") else 0

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        width = self.input_width(d_model)
        if self.head_dim is None and width % self.n_heads:
            text = "2 * d_model" if width != d_model else "d_model"
            yield self.problem_at("n_heads", f"must divide {text} = {width}, or head_dim must be given")
        elif self.head_dim is None and self.position.type == "rotary":
            head_dim = width // self.n_heads
            if self.position.fraction == 1 and head_dim % 2:
                yield self.problem_at("n_heads", f"gives head_dim {head_dim}; rotary positions need an even one")
            yield from self._fraction_problems(self.position, head_dim)

    def describe(self, d_model: int) -> str:
        head_dim = self.head_dim or self.input_width(d_model) // self.n_heads
        kv = "" if self.kv_heads == self.n_heads else f" ({self.kv_heads} key/value heads)"
        position = "" if self.position.type == "none" else f", {self.position.type}"
        if self.position.type == "rotary" and self.position.fraction != 1:
            position += f" of {self.position.width(head_dim)}"
        further = [f", window {self.sliding_window}"] if self.sliding_window else []
        further += [f", softcap {self.softcap:g}"] if self.softcap else []
        further += [f", qk norm per {'head' if self.qk_norm == 'head' else 'layer'}"] if self.qk_norm != "none" else []
        further += [", output gate"] if self.output_gate else []
        further += [", sinks"] if self.sinks else []
        return f"{super().describe(d_model)}: {self.n_heads} heads x {head_dim}{kv}{position}{''.join(further)}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        spec = self.spec(d_model)
        return {"wqkv": spec.head_dim * ((1 + self.output_gate) * spec.n_heads + 2 * spec.n_kv_heads)}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, q, k, v, and attention's output with its log-sum-exps; with a gate, that and what it
        makes of the output."""
        spec = self.spec(d_model)
        q, kv = spec.n_heads * spec.head_dim, 2 * spec.n_kv_heads * spec.head_dim
        attention = width * q + 4 * spec.n_heads
        kept = attention if registry.saved_ops("attention", self.backend) else 0
        gate = q if self.output_gate else 0
        everything = width * (2 * self.input_width(d_model) + q + kv + 2 * gate) + attention
        return SavedBytes(everything, kept)


class AttentionBlock(AttentionSection):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.attention:Attention"

    type: Literal["attention"]
