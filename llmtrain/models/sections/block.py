"""The base of every block's section: what the program asks of a block before torch is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Self

from llmtrain.config.base import Problem, Section
from llmtrain.kernels.registry import Operation, Spec
from llmtrain.models.costs import SavedBytes
from llmtrain.models.sections.layers import MLPConfig, NormConfig


class Kernel(NamedTuple):
    """The kernel that a block's `backend` setting chooses."""

    operation: Operation
    spec: Spec
    backend: str


class BlockSection(Section):
    """One named block of the model. A subclass adds `type: Literal[...]` and its own settings.

    implementation: "module:Class" of the block's Mixer, imported when a model is built.
    """

    implementation: ClassVar[str]

    norm: NormConfig | None = None
    """Default: model.norm."""
    mlp: MLPConfig | None = None

    @property
    def shared_copies(self) -> int:
        """Copies of a shared block, which feeds layers and is none itself; 0 for a block that is a layer."""
        return 0

    def load_implementation(self) -> Any:
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(module), name)

    def input_width(self, d_model: int) -> int:
        """Channels that the block's norm reads."""
        return d_model

    def width_problems(self, d_model: int) -> Iterator[Problem]:
        """Settings that do not fit model.d_model; paths start at the block."""
        yield from ()

    def kernel(self, d_model: int, dtype: str = "bfloat16", documents: bool = False) -> Kernel | None:
        """The kernel that `backend` chooses, to be checked before a model is built; None for a block without backends.

        documents: as HybridLM's.
        """
        return None

    def with_backends(self, norm: str, backend: str) -> Self:
        """The same function by other kernels; `backend` is left out where the block has no such setting."""
        changed: dict[str, Any] = {"norm": self.norm and self.norm.model_copy(update={"backend": norm})}
        return self.model_copy(update=changed | ({"backend": backend} if "backend" in type(self).model_fields else {}))

    def describe(self, d_model: int) -> str:
        """The mixer in one line of `llmtrain describe`."""
        return str(getattr(self, "type"))  # noqa: B009 (each subclass declares it as its own Literal)

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """Tensors that training keeps of the norm and the mixer, per token, for the memory estimate; the MLP adds its own.

        width: bytes of an activation. Default: input and output of the norm, the mixer's output.
        """
        return SavedBytes(3 * width * d_model, 0)
