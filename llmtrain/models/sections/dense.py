"""The section of the dense feed-forward layer. No torch here."""

from typing import ClassVar, Literal

from llmtrain.config.base import PositiveFloat, Width
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.feed_forward import Divided, FeedForwardSection


class MLPSection(FeedForwardSection):
    """Feed-forward layer of two matrices (`gelu`, `gelu_tanh`, `relu2`, `xielu`) or gated, of three (`swiglu`, `geglu`,
    `geglu_tanh`)."""

    implementation: ClassVar[str] = "llmtrain.models.feed_forward.dense:MLP"
    chunkable: ClassVar[bool] = True

    type: Literal["gelu", "gelu_tanh", "relu2", "xielu", "swiglu", "geglu", "geglu_tanh"] = "swiglu"
    """`_tanh` is the approximation of GELU by tanh (arXiv:1606.08415); relu2 is relu(x)^2 (Primer, arXiv:2109.08668).
    xielu is x / 2 + a x^2 above 0 and x / 2 + b (e^x - 1 - x) below, a and b learned in each layer (arXiv:2411.13010)."""
    d_ff: Width
    """Hidden width."""
    bias: bool = False
    activation_multiplier: PositiveFloat = 1.0
    """Factor of the activation's input: in a gated MLP, of the gate."""
    out_multiplier: PositiveFloat = 1.0
    """Factor of the output."""

    @property
    def gated(self) -> bool:
        return self.type in ("swiglu", "geglu", "geglu_tanh")

    def divided(self, d_model: int) -> list[Divided]:
        return [Divided("mlp.d_ff", self.d_ff)]

    def kept_products(self, d_model: int) -> dict[str, int]:
        return {"w_in": 2 * self.d_ff if self.gated else self.d_ff}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        up = self.kept_products(d_model)["w_in"]
        # Input and output of the norm, the first projection's output, and the second's input.
        return SavedBytes(width * (2 * d_model + up + self.d_ff))

    def describe(self, d_model: int) -> str:
        return f"{self.type} MLP {self.d_ff}"
