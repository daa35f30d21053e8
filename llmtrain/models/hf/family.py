"""Hugging Face model families: conversion of configs in both directions, and the correspondence of tensors.

No model of transformers is built here. The correspondence of a weight is declared once, for import and export. "Published"
is the side of Hugging Face: config.json and the tensors of a published checkpoint.
"""

import functools
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.other_types import lacking

# model_type in config.json, and the file of this folder for it. An export takes the first that expresses the model.
_FAMILIES = (
    *("mpt", "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "phi3", "granite", "gpt_neox", "starcoder2"),
    *("gemma2", "gemma3_text", "mamba2", "zamba2", "nemotron_h"),
    *("bamba", "granitemoehybrid", "falcon_h1", "qwen3_next", "olmo_hybrid", "kimi_linear"),
    *("mixtral", "olmoe", "qwen3_moe", "granitemoe", "dots1", "gpt_oss"),
    *("deepseek_v2", "deepseek_v3"),
    *("smollm3", "glm", "glm4", "seed_oss", "helium", "glm4_moe", "apertus", "zaya", "ministral", "ernie4_5"),
)


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
        """One line for each reason, with all the classes that have it."""
        classes: dict[str, list[str]] = {}
        for reason in self.reasons:
            name, _, text = reason.partition(": ")
            classes.setdefault(text.replace(name, "the class"), []).append(name)
        lines = [
            f"  {', '.join(names)}: {text if len(names) > 1 else text.replace('the class', names[0])}"
            for text, names in classes.items()
        ]
        return "\n".join(["no published class expresses this model:", *lines])


@dataclass(frozen=True)
class Part:
    """A published tensor that corresponds to one of our parameters, or to some rows of one.

    copies: further names of the same tensor in checkpoints: tied tensors, and older spellings.
        Read when `name` is absent, compared with it when both are present, never written.
    order: numbers of its rows in our order; empty: the same order (hf/row_orders.py). transposed: its last two dimensions are
        exchanged with respect to ours. rows: the dimension of rows, after that. value: of a constant, which files hold beside the
        weights and no parameter of ours is made of. in_memory: its name in the class, where files have another one.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    transposed: bool = False
    rows: int = 0
    value: float | None = None
    in_memory: str = ""

    @property
    def size(self) -> int:
        """Elements of our parameter."""
        return math.prod(self.shape) if self.value is None else 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.copies)

    def flatten(self, published: Tensor) -> Tensor:
        """The elements in our order, [size]. Raises UserError for a constant that is another one."""
        if self.value is not None:
            if not math.isclose(float(published), self.value, rel_tol=1 / 128):  # it may be rounded to bf16
                raise UserError(f"tensor {self.name} is {float(published):g}; there is only {self.value:g}")
            return published.new_empty(0)
        ours = published.mT if self.transposed else published
        if self.order:
            ours = ours.index_select(self.rows, torch.tensor(self.order, device=ours.device))
        return ours.reshape(-1)

    def unflatten(self, ours: Tensor) -> Tensor:
        """The inverse of `flatten`: a view where the order is the same."""
        if self.value is not None:
            return torch.full(self.shape, self.value, dtype=ours.dtype, device=ours.device)
        *outer, rows, columns = self.shape if self.transposed else (*self.shape, 1)
        ours = ours.view(*outer, columns, rows) if self.transposed else ours.view(self.shape)
        if self.order:
            inverse = torch.tensor(self.order, device=ours.device).argsort()
            ours = ours.index_select(self.rows, inverse)
        return ours.mT if self.transposed else ours


@dataclass(frozen=True)
class Weight:
    """One of our parameters and its published tensors: the parameter is their flat concatenation, viewed in its own shape.

    For example wqkv [3 d, d] is q, k, v [d, d] each, and conv.weight [channels, K] is conv1d.weight [channels, 1, K].

    cut_anywhere: files may have the same rows divided between the parts in another way.
    """

    ours: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    cut_anywhere: bool = False

    def __post_init__(self) -> None:
        assert sum(part.size for part in self.parts) == math.prod(self.shape), self

    @property
    def reordered(self) -> bool:
        """True where rows stand in another order there, or constants beside them."""
        return any(part.order or part.transposed or part.value is not None for part in self.parts)

    def join(self, published: Mapping[str, Tensor]) -> Tensor:
        """Concatenate published tensors, given by name. Raises UserError for one that is absent or has another shape, and
        for copies that differ."""
        shapes = {name: tuple(published[name].shape) for part in self.parts for name in part.names if name in published}
        found = [
            part.flatten(_read(part, self.shape_in_file(part, shapes), published, self.ours)) for part in self.parts
        ]
        return (found[0] if len(found) == 1 else torch.cat(found)).view(self.shape)

    def shape_in_file(self, part: Part, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape that a part must have. shapes: of the published tensors, by name."""
        if not self.cut_anywhere:
            return part.shape
        found = [shapes.get(one.name, (0,)) for one in self.parts]
        alike = all(shape[1:] == part.shape[1:] for shape in found)
        rows, expected = (sum(shape[0] for shape in of) for of in (found, [one.shape for one in self.parts]))
        return shapes[part.name] if alike and rows == expected else part.shape

    def split(self, ours: Tensor) -> dict[str, Tensor]:
        """Split our parameter into published tensors by name, as views where the layout allows."""
        flat = ours.reshape(-1).split([part.size for part in self.parts])
        return {part.name: part.unflatten(piece) for part, piece in zip(self.parts, flat, strict=True)}


def _read(part: Part, shape: tuple[int, ...], published: Mapping[str, Tensor], ours: str) -> Tensor:
    present = [name for name in part.names if name in published]
    if not present:
        raise UserError(f"tensor {part.name} is missing (for our {ours})")
    first, *copies = present
    tensor = published[first]
    if tuple(tensor.shape) != shape:
        raise UserError(f"tensor {first} has shape {list(tensor.shape)}, expected {list(shape)}")
    for name in copies:
        if not torch.equal(published[name], tensor):
            hint = "; for an output layer of its own, set tie_word_embeddings: false there" if "lm_head" in name else ""
            raise UserError(f"tensors {first} and {name} differ, but are one and the same by config.json{hint}")
    return tensor


class Family(Protocol):
    """The last class of a file of this folder. `published` is the content of config.json."""

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
    """The family for a config.json. Raises UnsupportedModelError, naming all families, or each value that is none of its key's."""
    found = published.get("model_type")
    if isinstance(found, str) and found in _FAMILIES:
        if wrong := list(wrong_values(published)):
            raise UnsupportedModelError(*wrong)
        return _load(found)
    if found is None and "ssm_cfg" in published:  # mamba_ssm's own format, without model_type
        return _load("mamba2")
    if found in (None, ""):
        reason = "no model_type"
    elif isinstance(found, str):
        reason = f"model_type {found!r}{lacking(published, _FAMILIES)}"
    else:
        reason = f"model_type = {json.dumps(found)}, which is no name"
    raise UnsupportedModelError(f"config.json has {reason}; there is {', '.join(sorted(_FAMILIES))}")


def family_for_model(config: ModelConfig, published: str | None = None) -> Family:
    """The family that can express a model of llmtrain. published: model_type of the folder that the model was imported from, whose
    family is taken where it can.

    Raises NoFamilyError with the missing features of each family, those with other types of layers last.
    """
    lacks: list[tuple[str, UnsupportedModelError]] = []
    for family in families(published):
        try:
            family.write_config(config)
        except UnsupportedModelError as error:
            lacks.append((family.architecture, error))
        else:
            return family
    lacks.sort(key=lambda item: isinstance(item[1], OtherLayersError))
    reasons = [f"{architecture}: {reason}" for architecture, error in lacks for reason in error.reasons]
    raise NoFamilyError(*reasons)


def families(first: str | None = None) -> list[Family]:
    """All, in the order in which an export tries them. first: the model_type of one that stands before the others."""
    return [_load(name) for name in sorted(_FAMILIES, key=lambda name: name != first)]


@functools.cache
def _load(name: str) -> Family:
    module = importlib.import_module(f"llmtrain.models.hf.{name}")
    *_, own = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)
    return own()


_MOST, _MOST_LAYERS = 2**53, 10_000
_NUMBERS = {
    "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "factor", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "mamba_headdim", "mamba_expand", "mamba_d_state", "mamba_d_conv",
    "mamba_ngroups", "n_mamba_heads", "attention_head_dim", "time_step_min", "time_step_max", "time_step_floor",
}  # fmt: skip
_NEVER_NULL = {"mamba_headdim", "attention_head_dim"}
_LAYERS = {"num_hidden_layers", "n_layers", "n_layer", "num_layers"}
_SIZES = {"hidden_size", "d_model", "vocab_size", "num_attention_heads", "n_heads", "intermediate_size", "head_dim"}
_LISTS = {"layers_block_type", "layer_types", "hybrid_layer_ids"}
_SECTIONS = {"attn_config", "rope_parameters", "rope_scaling", "ssm_cfg"}


def wrong_values(published: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """A reason for each value, at any depth, that is of another type than its key's, or out of range."""
    for key, value in published.items():
        here = f"{path}.{key}".lstrip(".")
        expected = _expected(key, value)
        if expected is not None:
            yield f"config.json: {here} = {json.dumps(value, default=str)}: expected {expected}"
        elif isinstance(value, Mapping):
            yield from wrong_values(value, here)


def _expected(key: str, value: Any) -> str | None:
    """Expected kind of a value; None where the value is allowed."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if value is None:
        return "a value" if key in _NEVER_NULL else None
    if key in _LISTS and not isinstance(value, (list, tuple)):
        return "a list"
    if key in _SECTIONS and not isinstance(value, Mapping):
        return "a mapping"
    if key in _LAYERS | _SIZES:
        most = _MOST_LAYERS if key in _LAYERS else _MOST
        return None if number is not None and 1 <= number <= most else f"an integer between 1 and {most:,}"
    if number is not None:
        return None if isinstance(number, float) or abs(number) <= _MOST else f"at most {_MOST:,}"
    if key in _NUMBERS and not (isinstance(value, Mapping) and set(value) == {"__float__"}):
        return "a number"
    return None
