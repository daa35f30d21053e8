"""What a Hugging Face model family is to us: a config in both directions, and which tensors make which.

No model of transformers is built here. A weight's correspondence is stated once and used for import and export.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmtrain.models.config import ModelConfig

# model_type in config.json -> the module of this folder that knows it.
_FAMILIES = {name: f"llmtrain.models.hf.{name}" for name in ("mpt", "llama", "mamba2", "zamba2")}


class UnsupportedModelError(ValueError):
    """A feature that the other side cannot express; the message names it, with the value found and what would do."""


@dataclass(frozen=True)
class Part:
    """A published tensor, or one that makes up some rows of one of ours."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Weight:
    """One parameter of ours and the published tensors it is made of: laid out flat one after another, then viewed as ours.

    So wqkv [3 d, d] is q, k, v [d, d] each, and conv.weight [channels, K] is conv1d.weight [channels, 1, K].
    copies: further names under which the published state dict repeats a part (tied or shared modules). Ignored on
        import when present; never written.
    """

    ours: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert sum(part.size for part in self.parts) == math.prod(self.shape), self

    def join(self, published: Mapping[str, Tensor]) -> Tensor:
        """Published tensors, by name -> ours. Raises ValueError for one that is absent or has another shape."""
        found = []
        for part in self.parts:
            if part.name not in published:
                raise ValueError(f"tensor {part.name} is missing (for our {self.ours})")
            tensor = published[part.name]
            if tuple(tensor.shape) != part.shape:
                raise ValueError(f"tensor {part.name} has shape {list(tensor.shape)}, expected {list(part.shape)}")
            found.append(tensor.reshape(-1))
        return (found[0] if len(found) == 1 else torch.cat(found)).view(self.shape)

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Ours -> published tensors by name, as views where the layout allows."""
        flat = ours.reshape(-1).split([part.size for part in self.parts])
        return {part.name: piece.view(part.shape) for part, piece in zip(self.parts, flat, strict=True)}


class Family(Protocol):
    """One file of this folder. `published` is the content of config.json."""

    architecture: str
    """The class in transformers, such as LlamaForCausalLM."""
    model_type: str

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """config.json -> our `model` section, valid for ModelConfig. Raises UnsupportedModelError."""
        ...

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Our model -> config.json, loadable without remote code. Raises UnsupportedModelError."""
        ...

    def weights(self, config: ModelConfig) -> list[Weight]:
        """Every parameter of HybridLM(config), in its order."""
        ...


def family_of(published: Mapping[str, Any]) -> Family:
    """The family that reads this config.json. Raises UnsupportedModelError, naming the four that there are."""
    found = published.get("model_type")
    if found in _FAMILIES:
        return _load(found)
    raise UnsupportedModelError(
        f"config.json has model_type {found!r}; there is {', '.join(sorted(_FAMILIES))}"
    )


def family_for(config: ModelConfig) -> Family:
    """The family that can express a model of ours.

    Raises UnsupportedModelError with, for every family, the first feature that it lacks.
    """
    reasons = []
    for family in families():
        try:
            family.write_config(config)
        except UnsupportedModelError as error:
            reasons.append(f"  {family.architecture}: {error}")
        else:
            return family
    raise UnsupportedModelError("no published class expresses this model:\n" + "\n".join(reasons))


def families() -> list[Family]:
    return [_load(name) for name in _FAMILIES]


def unread(weights: Iterable[Weight], names: Iterable[str]) -> list[str]:
    """Published tensors that no weight of ours takes: each is something that would be lost."""
    taken = {part.name for weight in weights for part in weight.parts}
    return sorted(set(names) - taken)


def _load(name: str) -> Family:
    return importlib.import_module(_FAMILIES[name]).FAMILY
