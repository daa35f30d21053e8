"""The base of the sections of feed-forward layers: what the program asks of one before torch is imported."""

import importlib
from typing import Any, ClassVar, NamedTuple

from llmtrain.config.base import Section
from llmtrain.kernels.registry import Operation, Spec
from llmtrain.models.costs import SavedBytes


class Kernel(NamedTuple):
    """The kernel that a section's `backend` setting chooses."""

    operation: Operation
    spec: Spec
    backend: str


class Divided(NamedTuple):
    """A number of heads, groups or channels that tensor-parallel ranks divide between them.

    repeats: with fewer of them than ranks several ranks have the same one.
    """

    name: str
    count: int
    repeats: bool = False

    def fits(self, ranks: int) -> bool:
        return self.count % ranks == 0 or (self.repeats and ranks % self.count == 0)


class Carried(NamedTuple):
    """Channels of the value that goes from layer to layer beside the hidden states: `reads`, of the one that a layer needs, and
    `hands_on`, of the one that the next layers get in its place. 0: none."""

    reads: int = 0
    hands_on: int = 0


class ImplementedSection(Section):
    """A section with a module of its own, and the `type` that names it, which a subclass declares as its own Literal.

    implementation: "module:Class", imported when a model is built.
    """

    implementation: ClassVar[str]

    @property
    def type_name(self) -> str:
        return getattr(self, "type")  # noqa: B009

    def load_implementation(self) -> Any:
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)


class FeedForwardSection(ImplementedSection):
    """A block's `mlp`. A subclass adds `type: Literal[...]` and its own settings; implementation: of the FeedForward."""

    chunkable: ClassVar[bool] = False
    """The layer can read a part of a sequence's tokens at a time (train.activation_checkpointing.mlp_tokens)."""
    without_function: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing of what is computed from given weights."""

    @property
    def carries(self) -> Carried:
        """The value that goes from layer to layer, where this layer reads or hands on one. Default: neither."""
        return Carried()

    def kernel(self, d_model: int, dtype: str = "bfloat16") -> Kernel | None:
        """The kernel that `backend` chooses, to be checked before a model is built; None for a layer without backends."""
        return None

    def function(self) -> dict[str, Any]:
        """The settings that say what the layer computes."""
        return self.model_dump(exclude=set(self.without_function))

    def divided(self, d_model: int) -> list[Divided] | None:
        """Numbers that tensor-parallel ranks divide (train.parallel.tensor), by their paths from the block. Default: None, the
        layer cannot be divided."""
        return None

    def kept_products(self, d_model: int) -> dict[str, int]:
        """Channels that selective checkpointing keeps of linear layers' outputs, by the layers' names in the module: of the
        products through which the input enters. All others are computed again. Default: none."""
        return {}

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Tensors that training keeps of the layer and its norm, per token, for the memory estimate.

        width: bytes of an activation. Default: input and output of the norm.
        """
        return SavedBytes(2 * width * d_model)

    def describe(self, d_model: int) -> str:
        """The layer in a line of `llmtrain describe`."""
        return self.type_name
