"""Hugging Face model families: conversion of configs in both directions, and the correspondence of tensors.

No model of transformers is built here. The correspondence of a weight is declared once, for import and export. "Published"
is the side of Hugging Face: config.json and the tensors of a published checkpoint.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig

# model_type in config.json -> the module of this folder for it.
_FAMILIES = {name: f"llmtrain.models.hf.{name}" for name in ("mpt", "llama", "mamba2", "zamba2")}


class UnsupportedModelError(UserError):
    """Features that the other side cannot express. Each reason names one, the value found, and what to set instead."""

    def __init__(self, *reasons: str):
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class OtherLayersError(UnsupportedModelError):
    """Layers of another type than the family has; no further reason is looked for."""


class NoFamilyError(UnsupportedModelError):
    """A model that no family expresses; the reasons are the missing features of each."""

    def __str__(self) -> str:
        return "no published class expresses this model:\n" + "\n".join(f"  {reason}" for reason in self.reasons)


@dataclass(frozen=True)
class Part:
    """A published tensor that corresponds to one of our parameters, or to some rows of one.

    copies: further names of the same tensor in checkpoints: tied tensors, and older spellings.
        Read when `name` is absent, compared with it when both are present, never written.
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
    """One of our parameters and its published tensors: the parameter is their flat concatenation, viewed in its own shape.

    For example wqkv [3 d, d] is q, k, v [d, d] each, and conv.weight [channels, K] is conv1d.weight [channels, 1, K].
    """

    ours: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert sum(part.size for part in self.parts) == math.prod(self.shape), self

    def join(self, published: Mapping[str, Tensor]) -> Tensor:
        """Concatenate published tensors, given by name. Raises UserError for one that is absent or has another shape, and
        for copies that differ."""
        found = [_read(part, published, self.ours).reshape(-1) for part in self.parts]
        return (found[0] if len(found) == 1 else torch.cat(found)).view(self.shape)

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Split our parameter into published tensors by name, as views where the layout allows."""
        flat = ours.reshape(-1).split([part.size for part in self.parts])
        return {part.name: piece.view(part.shape) for part, piece in zip(self.parts, flat, strict=True)}


def _read(part: Part, published: Mapping[str, Tensor], ours: str) -> Tensor:
    present = [name for name in part.names if name in published]
    if not present:
        raise UserError(f"tensor {part.name} is missing (for our {ours})")
    first, *copies = present
    tensor = published[first]
    if tuple(tensor.shape) != part.shape:
        raise UserError(f"tensor {first} has shape {list(tensor.shape)}, expected {list(part.shape)}")
    for name in copies:
        if not torch.equal(published[name], tensor):
            hint = "; for an output layer of its own, set tie_word_embeddings: false there" if "lm_head" in name else ""
            raise UserError(f"tensors {first} and {name} differ, but are one and the same by config.json{hint}")
    return tensor


class Family(Protocol):
    """One file of this folder. `published` is the content of config.json."""

    architecture: str
    """The class in transformers, such as LlamaForCausalLM."""
    model_type: str

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        """Convert config.json to a `model` section, valid for ModelConfig. Raises UnsupportedModelError with every reason."""
        ...

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Convert our config to config.json, loadable without remote code; the caller adds dtype and token ids.

        Raises UnsupportedModelError with every reason.
        """
        ...

    def weights(self, config: ModelConfig) -> list[Weight]:
        """Weights for all parameters of HybridLM(config), in its order. config: from read_config, or valid for write_config."""
        ...


def family_of_hf_config(published: Mapping[str, Any]) -> Family:
    """The family for a config.json. Raises UnsupportedModelError, naming all families."""
    found = published.get("model_type")
    if found in _FAMILIES:
        return _load(found)
    if found is None and "ssm_cfg" in published:  # mamba_ssm's own format, without model_type
        return _load("mamba2")
    raise UnsupportedModelError(f"config.json has model_type {found!r}; there is {', '.join(sorted(_FAMILIES))}")


def family_for_model(config: ModelConfig) -> Family:
    """The family that can express a model of llmtrain.

    Raises NoFamilyError with the missing features of each family, those with other types of layers last.
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


def _load(name: str) -> Family:
    return importlib.import_module(_FAMILIES[name]).FAMILY
