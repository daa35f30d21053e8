"""The model as a user writes it: dimensions, named blocks, and a one-line layer pattern. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import PositiveInt, Probability, Problem, Section, free
from llmtrain.models.pattern import Layer, PatternError, parse_pattern

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
SSDBackend = Literal["auto", "reference", "triton", "mamba_ssm"]
NormBackend = Literal["auto", "reference", "triton"]


class NormConfig(Section):
    """A normalisation layer over the last dimension."""

    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    bias: bool = False
    """LayerNorm's additive bias. RMSNorm has none."""
    eps: Annotated[float, Field(gt=0)] = 1e-5
    backend: NormBackend = free("auto")
    """In training steps. Validation, scoring and generation, and norms of queries and keys, are plain PyTorch. What is named
    must be able to serve wherever the model trains.
    """

    @property
    def function(self) -> NormConfig:
        """What it computes, by whatever backend."""
        return self.model_copy(update={"backend": "auto"})

    def problems(self) -> Iterator[Problem]:
        if self.type == "rmsnorm" and self.bias:
            yield Problem("bias", True, "RMSNorm has no bias; set bias: false or type: layernorm")


class MLPConfig(Section):
    """Feed-forward layer: `gelu` has two matrices, `swiglu` and `geglu` three."""

    type: Literal["gelu", "swiglu", "geglu"] = "swiglu"
    d_ff: PositiveInt
    """Hidden width."""
    bias: bool = False


class NoPosition(Section):
    """No position information inside attention (learned embeddings may still add it at the input)."""

    type: Literal["none"] = "none"


class AlibiPosition(Section):
    """Attention with linear biases (Press et al., arXiv:2108.12409)."""

    type: Literal["alibi"]
    max_bias: Annotated[float, Field(gt=0)] = 8.0
    """Slopes are 2^(-max_bias * i / n_heads)."""


class LinearScaling(Section):
    """Positions divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595)."""

    type: Literal["linear"]
    factor: Annotated[float, Field(gt=0)]


class Llama3Scaling(Section):
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp in between (arXiv:2407.21783).

    A frequency's turns within original_max_seq_len tell which it is: fewer than low_freq_factor, or more than
    high_freq_factor.
    """

    type: Literal["llama3"]
    factor: Annotated[float, Field(gt=0)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    original_max_seq_len: PositiveInt = 8192
    """Longest sequence before the extension."""

    def problems(self) -> Iterator[Problem]:
        if self.low_freq_factor >= self.high_freq_factor:
            yield Problem(
                "low_freq_factor", self.low_freq_factor, f"must be below high_freq_factor ({self.high_freq_factor})"
            )


RotaryScaling = Annotated[LinearScaling | Llama3Scaling, Field(discriminator="type")]


class RotaryPosition(Section):
    """Rotary embeddings (Su et al., arXiv:2104.09864), rotating the two halves of each head."""

    type: Literal["rotary"]
    theta: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling | None = None
    """Frequencies lowered for contexts longer than those of the first training."""


Position = Annotated[NoPosition | AlibiPosition | RotaryPosition, Field(discriminator="type")]


class _AttentionFields(Section):
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
    norm: NormConfig | None = None
    """Default: model.norm."""
    backend: AttentionBackend = free("auto")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    def problems(self) -> Iterator[Problem]:
        if self.n_heads % self.kv_heads:
            yield Problem("n_kv_heads", self.n_kv_heads, f"must divide n_heads ({self.n_heads})")
        if self.position.type == "rotary" and self.head_dim and self.head_dim % 2:
            yield Problem("head_dim", self.head_dim, "rotary positions need an even head_dim")


class AttentionBlock(_AttentionFields):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    type: Literal["attention"]
    mlp: MLPConfig | None = None


class Mamba2Block(Section):
    """Pre-norm Mamba-2 block (Dao & Gu, arXiv:2405.21060): x + mamba2(norm(x)), then an optional MLP."""

    type: Literal["mamba2"]
    d_state: PositiveInt = 128
    head_dim: PositiveInt = 64
    expand: PositiveInt = 2
    """d_inner = expand * d_model; n_heads = d_inner / head_dim."""
    n_groups: PositiveInt = 1
    """Groups that share B and C."""
    d_conv: PositiveInt = 4
    """Kernel width of the causal depthwise convolution."""
    chunk_size: PositiveInt = free(256)
    dt_min: Annotated[float, Field(gt=0)] = 1e-3
    dt_max: Annotated[float, Field(gt=0)] = 1e-1
    """Initial time steps are log-uniform between dt_min and dt_max."""
    dt_limit: tuple[float, float | None] | None = None
    """Clamp softplus(dt + dt_bias) to this range; [low, null] has no upper limit."""
    a_init_range: tuple[float, float] = (1.0, 16.0)
    """-A is drawn uniformly from this range."""
    conv_bias: bool = True
    proj_bias: bool = False
    norm_before_gate: bool = False
    """Gated norm: norm(x * silu(z)) when false, norm(x) * silu(z) when true."""
    gated_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Default: the norm's eps."""
    norm: NormConfig | None = None
    """Default: model.norm."""
    mlp: MLPConfig | None = None
    backend: SSDBackend = free("auto")
    """Of the scan; also of the convolution and the gated norm, where they have one of that name that can serve."""

    def problems(self) -> Iterator[Problem]:
        if self.dt_min > self.dt_max:
            yield Problem("dt_min", self.dt_min, f"must not exceed dt_max ({self.dt_max})")
        if self.dt_limit is not None and not 0 <= self.dt_limit[0] < _or_infinity(self.dt_limit[1]):
            yield Problem("dt_limit", list(self.dt_limit), "must be [low, high] with 0 <= low < high, or [low, null]")
        if not 0 < self.a_init_range[0] <= self.a_init_range[1]:
            yield Problem("a_init_range", list(self.a_init_range), "must be [low, high] with 0 < low <= high")


def _or_infinity(limit: float | None) -> float:
    return float("inf") if limit is None else limit


class SharedAttentionBlock(_AttentionFields):
    """Zamba2's shared transformer block (Glorioso et al., arXiv:2411.15242).

    Reads concat(hidden, embedding) of width 2 * d_model. Written `s+m` in the layer pattern: its output,
    through a linear layer of that invocation's own, is added to the input of block m before m's norm.
    head_dim defaults to 2 * d_model / n_heads and softmax_scale to (head_dim / 2)^-0.5.
    """

    type: Literal["shared_attention"]
    n_shared: PositiveInt = 1
    """Copies of the block, used in turn (ABAB)."""
    mlp: MLPConfig
    adapter_rank: PositiveInt | None = None
    """Rank of each invocation's low-rank adapter on the MLP's first projection."""
    attn_adapter_rank: PositiveInt | None = None
    """Rank of each invocation's low-rank adapters on queries, keys and values."""


Block = Annotated[AttentionBlock | Mamba2Block | SharedAttentionBlock, Field(discriminator="type")]


class InitConfig(Section):
    """Weights are N(0, std^2); projections that end in the residual stream, or beside it in a mixer's input, shrink with depth."""

    std: Annotated[float, Field(gt=0)] = 0.02
    scale_residual: bool = True
    """Divide the std of those projections by sqrt(2 * number of layers)."""


class ModelConfig(Section):
    """HybridLM = embedding -> layers -> norm -> head."""

    vocab_size: PositiveInt
    d_model: PositiveInt
    max_seq_len: PositiveInt = 2048
    """Longest sequence trained on; the length of learned position embeddings."""
    blocks: dict[str, Block]
    """Named blocks that `layers` refers to."""
    layers: str
    """The stack in one line: `m*6 (s+m m*5)*7`. `x*3` repeats, `(...)*3` repeats a group, `s+m` feeds shared block s into m."""
    positions: Literal["none", "learned"] = "none"
    """Learned position embeddings at the input. ALiBi and rotary positions belong to attention blocks."""
    norm: NormConfig = NormConfig()
    """The final norm, and the default of every block's."""
    tie_embeddings: bool = True
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    dropout: Probability = 0.0
    """On the embedding and on every residual branch."""
    init: InitConfig = InitConfig()

    def problems(self) -> Iterator[Problem]:
        layers: list[Layer] = []
        try:
            layers = parse_pattern(self.layers)
        except PatternError as error:
            yield Problem("layers", self.layers, str(error))
        used = set()
        for layer in layers:
            for name in filter(None, (layer.block, layer.shared)):
                used.add(name)
                if name not in self.blocks:
                    yield Problem("layers", name, f"no such block; model.blocks has {', '.join(sorted(self.blocks))}")
        for layer in dict.fromkeys(layers):
            block, shared = self.blocks.get(layer.block), self.blocks.get(layer.shared or "")
            if isinstance(block, SharedAttentionBlock):
                yield Problem(
                    "layers", layer.block, f"is a shared block; write '{layer.block}+NAME' to feed it into block NAME"
                )
            if shared is not None and not isinstance(shared, SharedAttentionBlock):
                yield Problem(
                    "layers", layer.shared, "stands before a '+', which takes a block of type shared_attention"
                )
        if layers:
            for name in sorted(set(self.blocks) - used):
                yield Problem(f"blocks.{name}", name, "is defined but never used in model.layers; use it or remove it")
        for name, block in self.blocks.items():
            for problem in _width_problems(block, self.d_model):
                yield Problem(f"blocks.{name}.{problem.path}", problem.found, problem.message)
            if block.norm and block.norm.model_fields_set == {"backend"} and block.norm.function != self.norm.function:
                yield Problem(
                    f"blocks.{name}.norm.backend",
                    block.norm.backend,
                    f"alone would make this norm one of type {block.norm.type} with eps {block.norm.eps:g}, unlike model.norm: "
                    "write its type, bias and eps too, or set model.norm.backend",
                )

    def with_backends(self, norm: NormBackend, of_block: Callable[[str, Block], str]) -> ModelConfig:
        """The same function by other kernels. of_block: the backend of the block of that name."""
        norms = {"backend": norm}
        blocks = {
            name: block.model_copy(
                update={"backend": of_block(name, block), "norm": block.norm and block.norm.model_copy(update=norms)}
            )
            for name, block in self.blocks.items()
        }
        return self.model_copy(update={"blocks": blocks, "norm": self.norm.model_copy(update=norms)})

    def layer_list(self) -> list[Layer]:
        """The expanded pattern, one entry per layer."""
        return parse_pattern(self.layers)


def _width_problems(block: Block, d_model: int) -> Iterator[Problem]:
    if isinstance(block, Mamba2Block):
        d_inner = block.expand * d_model
        if d_inner % block.head_dim:
            yield Problem("head_dim", block.head_dim, f"must divide expand * d_model = {d_inner}")
        elif (d_inner // block.head_dim) % block.n_groups:
            yield Problem(
                "n_groups",
                block.n_groups,
                f"must divide the {d_inner // block.head_dim} heads (expand * d_model / head_dim)",
            )
        return
    width = 2 * d_model if isinstance(block, SharedAttentionBlock) else d_model
    if block.head_dim is None and width % block.n_heads:
        text = "2 * d_model" if width != d_model else "d_model"
        yield Problem("n_heads", block.n_heads, f"must divide {text} = {width}, or head_dim must be given")
    elif block.head_dim is None and block.position.type == "rotary" and (width // block.n_heads) % 2:
        yield Problem(
            "n_heads", block.n_heads, f"gives head_dim {width // block.n_heads}; rotary positions need an even one"
        )


class LossConfig(Section):
    """Cross entropy over the vocabulary, averaged over tokens that have a label."""

    type: Literal["auto", "plain", "chunked"] = free("auto")
    """plain keeps all logits; chunked never does, and computes their gradient in the forward pass. auto: chunked on GPU."""
    chunk_tokens: PositiveInt = free(8192)
    """Tokens whose logits exist at one time in the chunked form."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log(Z)^2 (PaLM, arXiv:2204.02311 section 5)."""
