"""The section of a feed-forward layer. No torch here."""

from __future__ import annotations

from typing import Literal

from llmtrain.config.base import PositiveInt, Section
from llmtrain.models.costs import SavedBytes


class MLPConfig(Section):
    """Feed-forward layer: `gelu` has two matrices, `swiglu` and `geglu` three."""

    type: Literal["gelu", "swiglu", "geglu"] = "swiglu"
    d_ff: PositiveInt
    """Hidden width."""
    bias: bool = False

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """See BlockSection.saved_bytes."""
        up = self.d_ff if self.type == "gelu" else 2 * self.d_ff
        # Input and output of the norm, the first projection's output, and the second's input.
        return SavedBytes(width * (2 * d_model + up + self.d_ff), width * up)
