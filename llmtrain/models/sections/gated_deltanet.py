"""The section of a Gated DeltaNet block. No torch here."""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from llmtrain.config.base import PositiveFloat, Problem, Width, free
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import BlockSection, Divided, Kernel
from llmtrain.models.sections.layers import NormConfig

GatedDeltaBackend = Literal["auto", "reference", "triton", "fla"]


class DeltaRuleBlock(BlockSection):
    """The settings that blocks with a delta rule share."""

    without_function: ClassVar[tuple[str, ...]] = (
        *("type", "backend"),
        *("dt_min", "dt_max", "a_init_range"),  # of fresh weights
    )

    n_heads: Width
    """Heads of values, each with a state of key_head_dim x value_head_dim."""
    key_head_dim: Width = 128
    """Channels of a head of queries and of keys."""
    value_head_dim: Width = 128
    """Channels of a head of values."""
    d_conv: Width = 4
    """Kernel width of the causal depthwise convolution of queries, keys and values."""
    dt_min: PositiveFloat = 1e-3
    dt_max: PositiveFloat = 1e-1
    """Initial time steps, softplus(dt_bias), are log-uniform between dt_min and dt_max."""
    a_init_range: tuple[PositiveFloat, PositiveFloat] = (0.01, 16.0)
    """-A is drawn uniformly from this range."""
    gated_norm_eps: PositiveFloat | None = None
    """Of the norm of each head's output. Default: the norm's eps."""

    @property
    def key_heads(self) -> int:
        """Heads of queries and keys."""
        return self.n_heads

    @abc.abstractmethod
    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel: ...

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.dt_min > self.dt_max:
            yield self.problem_at("dt_min", f"must not exceed dt_max ({self.dt_max})")
        if self.a_init_range[0] > self.a_init_range[1]:
            yield Problem("a_init_range", list(self.a_init_range), "must be [low, high] with low <= high")

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        eps = self.gated_norm_eps or (self.norm or norm).eps
        return super().function(d_model, norm) | {"gated_norm_eps": eps}

    def widths(self) -> tuple[int, int]:
        """Channels of all heads of keys, and of values."""
        return self.key_heads * self.key_head_dim, self.n_heads * self.value_head_dim

    def segments_refusal(self, d_model: int, documents: bool = False) -> None:
        """No reason: each segment is a sequence of its own for the kernels, and no backend limits the values beside which its
        transition is computed."""

    def gathered_bytes(self, d_model: int, width: int, seq_len: int, context: int) -> float:
        """Per segment of the others, of each head in fp32 what it adds to the state and what it makes of it, and the
        convolution's inputs at its end."""
        keys, values = self.widths()
        ends = width * (self.d_conv - 1) * (2 * keys + values)
        state = self.key_head_dim * (self.value_head_dim + self.key_head_dim)
        return 2 * (context - 1) * (ends + 4 * self.n_heads * state)

    def kept_in_segments(self, d_model: int, width: int) -> SavedBytes:
        """Values that are wider by a key's channels, what the rule returns for them, and what it keeps of so many more."""
        block = self.model_copy(update={"value_head_dim": self.value_head_dim + self.key_head_dim})
        wider, alone = block._rule_bytes(width), self._rule_bytes(width)
        beside = [a - b for a, b in zip(wider, alone, strict=True)]
        return SavedBytes(beside[0] + 2 * width * self.n_heads * block.value_head_dim, beside[1])

    @abc.abstractmethod
    def _rule_bytes(self, width: int) -> tuple[float, float]:
        """Bytes per token that the rule keeps beside its arguments and y, and that its forward returns as one operator."""


class GatedDeltaNetBlock(DeltaRuleBlock):
    """Pre-norm Gated DeltaNet block (Yang et al., arXiv:2412.06464): x + gated_deltanet(norm(x)), then an optional MLP."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.gated_deltanet:GatedDeltaNet"

    type: Literal["gated_deltanet"]
    n_key_heads: Width | None = None
    """Heads of queries and keys: n_heads (the default), or a divisor of it."""
    negative_eigenvalues: bool = False
    """beta is 2 sigmoid(b) rather than sigmoid(b): a token's update may turn the sign of what the state holds along its key
    (Grazzi et al., arXiv:2411.12537)."""
    backend: GatedDeltaBackend = free("auto")

    @property
    def key_heads(self) -> int:
        return self.n_key_heads or self.n_heads

    def problems(self) -> Iterator[Problem]:
        if self.n_heads % self.key_heads:
            yield self.problem_at("n_key_heads", f"must divide n_heads ({self.n_heads})")
        yield from super().problems()

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        return super().function(d_model, norm) | {"n_key_heads": self.key_heads}

    def spec(self, d_model: int, dtype: str = "bfloat16") -> GatedDeltaSpec:
        """The kernel's view of the block."""
        return GatedDeltaSpec(self.n_heads, self.key_heads, self.key_head_dim, self.value_head_dim, dtype)

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("gated_delta", self.spec(d_model, dtype), self.backend)

    def divided(self, d_model: int) -> list[Divided]:
        return [Divided("n_heads", self.n_heads), Divided("n_key_heads", self.key_heads, repeats=True)]

    def describe(self, d_model: int) -> str:
        groups = "" if self.key_heads == self.n_heads else f" ({self.key_heads} key heads)"
        sign = ", negative eigenvalues" if self.negative_eigenvalues else ""
        return f"gated_deltanet: {self.n_heads} heads x {self.key_head_dim} x {self.value_head_dim}{groups}{sign}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        return {"in_proj": 2 * sum(self.widths()) + 2 * self.n_heads}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, in_proj's output, the convolution's, normalised q and k, y, and the gated norm's
        output; in fp32 decays and beta.

        The reference keeps in fp32 per head three squares of a chunk, w and five tensors like k, three like v, and per chunk
        two states and a transition; fla's kernels keep one square of a chunk in the activations' format, and ours also w, what
        tokens write and the states.
        """
        (keys, values), heads = self.widths(), self.n_heads
        in_proj = self.kept_products(d_model)["in_proj"]
        everything = width * (2 * d_model + in_proj + (2 * keys + values) + 2 * keys + 2 * values) + 4 * 3 * heads
        kept, results = self._rule_bytes(width)
        return SavedBytes(everything + kept, results)

    def _rule_bytes(self, width: int) -> tuple[float, float]:
        spec, heads, k, v = self.spec(1), self.n_heads, self.key_head_dim, self.value_head_dim
        chunk = spec.chunk_size
        if self.backend == "fla":
            return heads * (width * chunk + 4), heads * (width * (v + chunk) + 4 * (1 + k * v / chunk))
        if self.backend == "triton":
            kept = heads * width * (chunk + k + v + k * v / chunk)
            return kept, kept + heads * (width * v + 4 * k * v / chunk)
        return 4 * heads * (3 * chunk + 5 * k + 3 * v + (k + 2 * v) * k / chunk), 0
