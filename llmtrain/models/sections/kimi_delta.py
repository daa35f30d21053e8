"""The section of a Kimi Delta Attention block. No torch here."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import PositiveFloat, Width, free
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.block import Divided, Kernel
from llmtrain.models.sections.gated_deltanet import DeltaRuleBlock
from llmtrain.models.sections.layers import NormConfig

KimiDeltaBackend = Literal["auto", "reference", "fla"]


class KimiDeltaBlock(DeltaRuleBlock):
    """Pre-norm Kimi Delta Attention block (arXiv:2510.26692): x + kimi_delta(norm(x)), then an optional MLP. As Gated DeltaNet,
    with a decay for each channel of the keys."""

    implementation: ClassVar[str] = "llmtrain.models.mixers.kimi_delta:KimiDelta"

    type: Literal["kimi_delta"]
    gate_rank: Width | None = None
    """Channels between the two projections that make the decays, and between those of the output's gate. Default:
    value_head_dim."""
    lower_bound: Annotated[float, Field(ge=-1e3, lt=0)] | None = None
    """The logarithm of a decay is lower_bound sigmoid(exp(A_log) (a + dt_bias)), at least lower_bound; published models have -5
    (and begin with a_init_range: [1, 1]). Default: -exp(A_log) softplus(a + dt_bias), without a bound."""
    a_init_range: tuple[PositiveFloat, PositiveFloat] = (1.0, 16.0)
    """exp(A_log) is drawn uniformly from this range."""
    backend: KimiDeltaBackend = free("auto")

    @property
    def rank(self) -> int:
        return self.gate_rank or self.value_head_dim

    def function(self, d_model: int, norm: NormConfig) -> dict[str, Any]:
        return super().function(d_model, norm) | {"gate_rank": self.rank}

    def spec(self, d_model: int, dtype: str = "bfloat16") -> KimiDeltaSpec:
        return KimiDeltaSpec(self.n_heads, self.n_heads, self.key_head_dim, self.value_head_dim, dtype)

    def gated_norm(self, norm: NormConfig, dtype: str = "bfloat16") -> GatedNormSpec:
        """Specification of the norm of each head's output. norm: the model's."""
        eps = self.gated_norm_eps or (self.norm or norm).eps
        return GatedNormSpec(self.widths()[1], self.n_heads, eps, True, dtype, "sigmoid")

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel:
        return Kernel("kimi_delta", self.spec(d_model, dtype), self.backend)

    def divided(self, d_model: int) -> list[Divided]:
        return [Divided("n_heads", self.n_heads)]

    def describe(self, d_model: int) -> str:
        bound = "" if self.lower_bound is None else f", decays of at least exp({self.lower_bound:g})"
        return f"kimi_delta: {self.n_heads} heads x {self.key_head_dim} x {self.value_head_dim}{bound}"

    def kept_products(self, d_model: int) -> dict[str, int]:
        keys, values = self.widths()
        return {"in_proj": 2 * keys + values + self.n_heads + 2 * self.rank}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Input and output of the norm, in_proj's output, the convolution's, normalised q and k, both gates before their
        nonlinearity, y, and the gated norm's output; in fp32 the decays and what they are made of, and beta.

        The reference keeps in fp32 per head what Gated DeltaNet's does, decays of each channel four times, and for each halving
        of a chunk two and a half tensors like k and the squares so far; fla's kernels keep running sums of the decays in fp32,
        and two squares of a chunk in the activations' format.
        """
        (keys, values), heads = self.widths(), self.n_heads
        in_proj = self.kept_products(d_model)["in_proj"]
        everything = width * (2 * d_model + in_proj + (2 * keys + values) + 3 * keys + 3 * values)
        kept, results = self._rule_bytes(width)
        return SavedBytes(everything + 4 * (3 * keys + heads) + kept, results)

    def _rule_bytes(self, width: int) -> tuple[float, float]:
        spec, heads, k, v = self.spec(1), self.n_heads, self.key_head_dim, self.value_head_dim
        chunk = spec.chunk_size
        if self.backend == "fla":
            kept = heads * (2 * width * chunk + 4 * k)
            return kept, kept + heads * (width * v + 4 * k * v / chunk)
        halvings = chunk.bit_length() - 1
        return 4 * heads * (8 * chunk + (9 + 2.5 * halvings) * k + 3 * v + (k + 2 * v) * k / chunk), 0
