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
    """Features that the other side cannot express. Each reason names one, the value found, and what would do."""

    def __init__(self, *reasons: str):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class OtherLayersError(UnsupportedModelError):
    """The layers are of another kind altogether, so that no further reason was looked for."""


class NoFamilyError(UnsupportedModelError):
    """No family at all expresses a model; the reasons say what each lacks."""

    def __str__(self) -> str:
        return "no published class expresses this model:\n" + "\n".join(f"  {reason}" for reason in self.reasons)


@dataclass(frozen=True)
class Part:
    """A published tensor that is one of ours, or some rows of one.

    copies: further names under which checkpoints hold the same tensor: what is tied to it, and older spellings.
        Read when `name` is absent, compared with it when both are there, never written.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.copies)


@dataclass(frozen=True)
class Weight:
    """One parameter of ours and the published tensors it is made of: laid out flat one after another, then viewed as ours.

    So wqkv [3 d, d] is q, k, v [d, d] each, and conv.weight [channels, K] is conv1d.weight [channels, 1, K].
    """

    ours: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert sum(part.size for part in self.parts) == math.prod(self.shape), self

    def join(self, published: Mapping[str, Tensor]) -> Tensor:
        """Published tensors, by name -> ours. Raises ValueError for one that is absent or has another shape, and for
        copies that differ."""
        found = [_read(part, published, self.ours).reshape(-1) for part in self.parts]
        return (found[0] if len(found) == 1 else torch.cat(found)).view(self.shape)

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Ours -> published tensors by name, as views where the layout allows."""
        flat = ours.reshape(-1).split([part.size for part in self.parts])
        return {part.name: piece.view(part.shape) for part, piece in zip(self.parts, flat, strict=True)}


def _read(part: Part, published: Mapping[str, Tensor], ours: str) -> Tensor:
    present = [name for name in part.names if name in published]
    if not present:
        raise ValueError(f"tensor {part.name} is missing (for our {ours})")
    first, *copies = present
    tensor = published[first]
    if tuple(tensor.shape) != part.shape:
        raise ValueError(f"tensor {first} has shape {list(tensor.shape)}, expected {list(part.shape)}")
    for name in copies:
        if not torch.equal(published[name], tensor):
            hint = "; for an output layer of its own, set tie_word_embeddings: false there" if "lm_head" in name else ""
            raise ValueError(f"tensors {first} and {name} differ, but are one and the same by config.json{hint}")
    return tensor


class Family(Protocol):
    """One file of this folder. `published` is the content of config.json."""

    architecture: str
    """The class in transformers, such as LlamaForCausalLM."""
    model_type: str

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """config.json -> our `model` section, valid for ModelConfig. Raises UnsupportedModelError with every reason."""
        ...

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Our model -> config.json, loadable without remote code; dtype and token ids are the caller's to add.

        Raises UnsupportedModelError with every reason.
        """
        ...

    def weights(self, config: ModelConfig) -> list[Weight]:
        """Every parameter of HybridLM(config), in its order. config: one that write_config takes, or from read_config."""
        ...


def family_of_hf_config(published: Mapping[str, Any]) -> Family:
    """The family that reads this config.json. Raises UnsupportedModelError, naming the four that there are."""
    found = published.get("model_type")
    if found in _FAMILIES:
        return _load(found)
    if found is None and "ssm_cfg" in published:  # mamba_ssm's own format, which knows no model_type
        return _load("mamba2")
    raise UnsupportedModelError(f"config.json has model_type {found!r}; there is {', '.join(sorted(_FAMILIES))}")


def family_for_model(config: ModelConfig) -> Family:
    """The family that can express a model of ours.

    Raises UnsupportedModelError with what each family lacks, those of other layers altogether last.
    """
    lacks: list[tuple[str, UnsupportedModelError]] = []
    for family in families():
        try:
            family.write_config(config)
        except UnsupportedModelError as error:
            lacks.append((family.architecture, error))
        else:
            return family
    lacks.sort(key=lambda item: isinstance(item[1], OtherLayersError))
    reasons = [f"{architecture}: {reason}" for architecture, error in lacks for reason in error.reasons]
    raise NoFamilyError(*reasons)


def families() -> list[Family]:
    return [_load(name) for name in _FAMILIES]


def unused_tensors(weights: Iterable[Weight], names: Iterable[str]) -> list[str]:
    """Published tensors that no weight of ours takes: each is something that would be lost."""
    taken = {name for weight in weights for part in weight.parts for name in part.names}
    return sorted(set(names) - taken)


def _load(name: str) -> Family:
    return importlib.import_module(_FAMILIES[name]).FAMILY
