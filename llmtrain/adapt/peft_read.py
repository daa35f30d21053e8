"""Adapters of folders that peft (0.21) or `llmtrain export` has written, for models of ours."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from llmtrain.adapt.base import adaptations, meta_model
from llmtrain.adapt.lora import Site
from llmtrain.adapt.peft_folder import BASE, CONFIG, PREFIX, WEIGHTS, most, parameter_keys
from llmtrain.adapt.peft_names import PublishedLayer, published_layers
from llmtrain.config.limits import DOCUMENT_SECONDS, time_limit
from llmtrain.config.regular_file import read_json, require_regular
from llmtrain.errors import UserError, first_few
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Family, UnsupportedModelError, families
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layer_part import persistent_buffers
from llmtrain.schema.adapt import AdaptConfig, LoraConfig, LoraGroup

_KINDS = {"lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"} | dict.fromkeys(
    ("lora_magnitude_vector", "lora_magnitude_vector.weight"), "magnitude"
)
_BASE_LAYER = ".base_layer.weight"
_PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
_TARGETS_HINT = "train or save it without, then import"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "megatron_config": (None,),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings of peft that change what is computed, and their values with which ours is the same. Other initial values than these
change the base's weights (pissa, olora, corda, loftq)."""


@dataclass(frozen=True)
class Adapters:
    """Adapters that were read.

    adapt: the section for a model of ours. tensors: its added parameters by name. base: of llmtrain's own record. beneath: weights
    of the base, by our names, that peft saves beside adapters of embedding and head.
    """

    adapt: AdaptConfig
    tensors: dict[str, Tensor]
    base: Mapping[str, Any] | None
    beneath: dict[str, Tensor]


def recorded_base(folder: Path) -> dict[str, Any] | None:
    """The checkpoint beneath that an export of ours names."""
    return read_json(folder / BASE) if (folder / BASE).is_file() else None


def is_peft(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def read_peft(folder: Path, config: ModelConfig, published: str | None = None) -> Adapters:
    """The adapters of a class that expresses the model of this config. published: the base's model_type, where it was published;
    other classes may have the same names and another order of rows.

    Raises UserError, one line with file and remedy, for settings of peft that ours does not have, and for adapters of another
    model."""
    settings = _read_settings(folder / CONFIG)
    tensors = _read_tensors(folder / WEIGHTS)
    beneath = {key: tensors.pop(key) for key in list(tensors) if key.endswith(_BASE_LAYER)}
    modules = _by_module(folder, tensors)
    if not modules:
        raise UserError(f"{folder / WEIGHTS}: there is no adapter in it (no tensor {PREFIX}*.lora_A.weight)")
    layers, modules = _layers_with(modules, settings.get("target_parameters") or [], config, folder, published)
    ranks, alphas, made = dict[str, int](), dict[str, float](), dict[str, dict[str, Any]]()
    dora = bool(settings.get("use_dora"))
    with time_limit(DOCUMENT_SECONDS, f"{folder / CONFIG}: rank_pattern and alpha_pattern"):
        of_modules = {name: _rank_and_alpha(settings, name) for name in modules}
    for name, found in modules.items():
        layer = layers[name]
        if dora and (layer.is_embedding or layer.site.name == "head"):
            raise UserError(
                f"{folder / CONFIG}: use_dora of {name}: only layers of mixers and MLPs have it here; {_TARGETS_HINT}"
            )
        a, b = _checked(folder / WEIGHTS, name, layer, found, dora)
        n = layer.site.weight.shape[0] if layer.is_experts else 1
        rank = a.shape[0] // n
        expected, alpha = of_modules[name]
        if rank != expected:
            raise UserError(
                f"{folder / CONFIG}: rank {expected} of {name}, whose tensors have {rank}; save the adapter again"
            )
        for target, first, rows in _units_of(layer, folder):
            ranks[target], alphas[target] = rank, float(alpha)
            cut = slice(first - layer.first, first - layer.first + rows)
            of = made.setdefault(layer.site.place, {"downs": {}, "tensors": {}})
            unit = target.removeprefix(layer.site.name).removeprefix(".") or "whole"
            if layer.is_embedding:
                of["tensors"] = {"down.weight": a.t(), "up.weight": b}
                continue
            if layer.is_experts:
                of["tensors"] = {
                    "down": a.unflatten(0, (n, rank)),
                    "up": layer.ours(b).unflatten(1, (rank, n)).permute(2, 0, 1),
                }
                continue
            of["downs"][first] = a
            of["tensors"][f"up.{unit}.weight"] = layer.ours(b)[cut]
            if dora:
                of["tensors"][f"magnitude.{unit}.weight"] = layer.ours(found["magnitude"].reshape(-1))[cut]
    section = _section(settings, ranks, alphas, dora)
    ours = {f"{place}.{name}": tensor for place, of in made.items() for name, tensor in of["tensors"].items()}
    for place, of in made.items():
        if of["downs"]:
            ours[f"{place}.down.weight"] = torch.cat([of["downs"][first] for first in sorted(of["downs"])])
    compared = {
        f"{layers[module].site.name}.weight": tensor
        for key, tensor in beneath.items()
        if (module := key.removeprefix(PREFIX).removesuffix(_BASE_LAYER)) in modules
    }
    return Adapters(AdaptConfig(lora=section), ours, recorded_base(folder), compared)


def _with_parameters(
    folder: Path, targets: Sequence[str], modules: Mapping[str, dict[str, Tensor]], parameters: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """The modules, those that peft wraps around a parameter of experts by the parameter's name. targets: target_parameters, which
    are ends of names. parameters: of the class."""
    matched = {name: [t for t in targets if f".{name}".endswith(f".{t}")] for name in parameters}
    keys = parameter_keys([name for name, found in matched.items() if found])
    wrappers = {key: name for name, key in keys.items()}
    owners = {name.rpartition(".")[0] for name in keys}
    for module in sorted(owners):
        there = sorted(name for name in modules if name.split(".base_layer")[0] == module)
        if there and there != sorted(key for name, key in keys.items() if name.rpartition(".")[0] == module):
            named = [name for name in keys if name.rpartition(".")[0] == module]
            raise UserError(
                f"{folder / WEIGHTS}: {module} has adapters {first_few(there)}, and target_parameters of {CONFIG} has "
                f"{first_few(named)} of it; save the adapter again"
            )
    used = {t for name, key in keys.items() if key in modules for t in matched[name]}
    if unused := [target for target in targets if target not in used]:
        raise UserError(
            f"{folder / CONFIG}: target_parameters: {first_few(unused)}: no adapter in {WEIGHTS} is of it, as where a name fits no "
            "parameter, which peft passes over; leave it out"
        )
    return {wrappers.get(name, name): found for name, found in modules.items()}


def _layers_with(
    modules: Mapping[str, dict[str, Tensor]],
    targets: Sequence[str],
    config: ModelConfig,
    folder: Path,
    published: str | None,
) -> tuple[dict[str, PublishedLayer], dict[str, dict[str, Tensor]]]:
    """Layers by name, of the first class with the model's parameters that has all these modules, and these by the names of layers:
    of those that express the model, as an export takes them, before others. targets: target_parameters."""
    file = folder / WEIGHTS
    unknown = dict[str, list[str]]()
    model = meta_model(config)
    names = {*(name for name, _ in model.named_parameters()), *persistent_buffers(model)}
    fitting = [family for family in families(published) if _has_parameters(family, config, names)]
    for family in sorted(fitting, key=lambda family: not _expresses(family, config)):
        layers = {name: one for one in published_layers(config, family) for name in (one.module, *one.others)}
        parameters = [name for name, one in layers.items() if one.is_experts]
        owners = {name.rpartition(".")[0] for name in parameters} if targets else set[str]()
        if not (
            lacking := [name for name in modules if name not in layers and name.split(".base_layer")[0] not in owners]
        ):
            return layers, _with_parameters(folder, targets, modules, parameters)
        unknown[family.architecture] = lacking
    if not unknown:
        raise UserError(f"{file}: no published class has the parameters of this base, so it has no adapters of peft")
    architecture, lacking = min(unknown.items(), key=lambda item: len(item[1]))
    raise UserError(
        f"{file}: {architecture}, which this base is, has no {first_few(lacking)}; these adapters are of another model"
    )


def _has_parameters(family: Family, config: ModelConfig, names: Collection[str]) -> bool:
    try:
        return {weight.ours for weight in family.weights(config)} == names
    except (UserError, AssertionError, AttributeError):  # of layers that this family does not have
        return False


def _expresses(family: Family, config: ModelConfig) -> bool:
    try:
        family.write_config(config)
    except UnsupportedModelError:
        return False
    return True


def attach(model: HybridLM, adapters: Adapters) -> HybridLM:
    """Add adapters to a model in memory, which changes. Tensors take the format of its weights."""
    for converter in adaptations(adapters.adapt):
        converter.convert(model, model.platform)
    parameters = dict(model.named_parameters())
    for name, tensor in adapters.beneath.items():
        own = parameters[name]
        if tensor.shape != own.shape or not torch.equal(tensor.to(own), own):
            raise UserError(
                f"{name} of the base is another one than the adapters' folder has; they are of another base"
            )
    for name, tensor in adapters.tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise UserError(
                f"{name} {list(tensor.shape)} of the adapters has no place in this base; they are of another base"
            )
        parameters[name].data = tensor.to(model.embed.weight)
    return model


def _units_of(layer: PublishedLayer, folder: Path) -> list[tuple[str, int, int]]:
    """(target, first row, rows) of our adapters that a published one becomes."""
    site: Site = layer.site
    found = [
        (site.name if name == "whole" else f"{site.name}.{name}", first, rows)
        for name, first, rows in site.targets()[site.name]
    ]
    if layer.is_embedding or layer.is_experts:
        return found
    inside = [one for one in found if layer.first <= one[1] and one[1] + one[2] <= layer.first + layer.rows]
    if sum(rows for _, _, rows in inside) != layer.rows:
        raise UserError(f"{folder / CONFIG}: {layer.module} is a part of {site.name}, which has one adapter here")
    return inside


def _section(
    settings: Mapping[str, Any], ranks: Mapping[str, int], alphas: Mapping[str, float], dora: bool
) -> LoraConfig:
    rank, alpha = most(ranks.values()), most(alphas.values())
    groups = [
        LoraGroup(match=name, rank=ranks[name], alpha=alphas[name])
        for name in ranks
        if (ranks[name], alphas[name]) != (rank, alpha)
    ]
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        rslora=bool(settings.get("use_rslora")),
        dora=dora,
        dropout=float(settings.get("lora_dropout") or 0),
        targets=list(ranks),
        groups=groups,
    )


def _rank_and_alpha(settings: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    rank, alpha = (_pattern(settings.get(_PATTERNS[key]), name, settings.get(key, 8)) for key in ("r", "lora_alpha"))
    return rank, alpha


def _pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first key that is the name or the end of it; peft takes keys for regular expressions, as here."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)


_VALUES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "r": ("whole number above 0", lambda one: one >= 1 and one == one // 1),
    "lora_alpha": ("number above 0", lambda one: 0 < one < math.inf),
    "lora_dropout": ("number from 0 to below 1", lambda one: 0 <= one < 1),
}


def _check_values(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError for ranks, alphas and patterns that are none."""
    for name, default in (("r", 8), ("lora_alpha", 8), ("lora_dropout", 0)):
        patterns = (settings.get(_PATTERNS[name]) if name in _PATTERNS else None) or {}
        if not isinstance(patterns, dict):
            raise UserError(f"{file}: {_PATTERNS[name]} is no mapping; {_TARGETS_HINT}")
        value = settings.get(name)
        for key, one in {name: default if value is None else value, **patterns}.items():
            expected, fits = _VALUES[name]
            if isinstance(one, bool) or not isinstance(one, (int, float)) or not fits(one):
                raise UserError(f"{file}: {key} = {json.dumps(one)} is no {expected}; {_TARGETS_HINT}")
        for key in patterns:
            try:
                re.compile(key)
            except re.error as error:
                raise UserError(
                    f"{file}: {_PATTERNS[name]}: {key!r} is no regular expression ({error}); {_TARGETS_HINT}"
                ) from None


def _checked(
    file: Path, name: str, layer: PublishedLayer, found: Mapping[str, Tensor], dora: bool
) -> tuple[Tensor, Tensor]:
    for kind, what in (("a", "lora_A"), ("b", "lora_B"), *([("magnitude", "lora_magnitude_vector")] if dora else [])):
        if kind not in found:
            raise UserError(f"{file}: {name} has no {what}; save the adapter again")
    a, b, width = found["a"], found["b"], layer.site.columns
    expected = {"a": (a.shape[0], width), "b": (layer.rows, a.shape[0])}
    for kind, tensor in (("a", a), ("b", b)):
        if tuple(tensor.shape) != expected[kind]:
            raise UserError(
                f"{file}: {name}.lora_{kind.upper()} has shape {list(tensor.shape)}, for the layer [{layer.rows}, {width}] of this "
                f"base it would be {list(expected[kind])}; these adapters are of another base"
            )
    n = layer.site.weight.shape[0] if layer.is_experts else 1
    if a.shape[0] % n:
        raise UserError(
            f"{file}: {name}.lora_A has {a.shape[0]} rows, no multiple of the {n} experts of this base; these adapters are of "
            "another base"
        )
    if (rank := a.shape[0] // n) > min(width, layer.rows):
        raise UserError(
            f"{file}: {name} has rank {rank}, and the layer {min(width, layer.rows)} channels; train it with a smaller rank"
        )
    return a, b


def _by_module(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Published name of a module -> its tensors by kind."""
    found, others = dict[str, dict[str, Tensor]](), list[str]()
    for key, tensor in tensors.items():
        kind = next((kind for kind in _KINDS if key.endswith(f".{kind}")), None)
        if kind is None or not key.startswith(PREFIX):
            others.append(key)
        else:
            module = key.removeprefix(PREFIX).removesuffix(f".{kind}")
            found.setdefault(module, {})[_KINDS[kind]] = tensor
    if others:
        raise UserError(
            f"{folder / WEIGHTS}: {first_few(others)}: tensors that are no part of a LoRA adapter; {_TARGETS_HINT} it again"
        )
    return found


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy the folder again") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file} holds no mapping; it is no adapter_config.json of peft")
    for name, values in _UNSUPPORTED.items():
        if name in settings and settings[name] not in values:
            raise UserError(f"{file}: {name} = {json.dumps(settings[name])} is not here; {_remedy(name)}")
    _check_values(file, settings)
    return settings


def _remedy(name: str) -> str:
    if name == "init_lora_weights":
        return "it changed the base's weights: have peft save a plain LoRA (path_initial_model_for_weight_conversion)"
    if name == "peft_type":
        return "LORA is; merge it with peft (merge_and_unload), and import the merged model"
    return f"{_TARGETS_HINT}, or merge it with peft (merge_and_unload) and import the merged model"


def _read_tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        other = file.with_name("adapter_model.bin")
        hint = f"; {other.name} is a pickle, have peft save it with safe_serialization=True" if other.is_file() else ""
        raise UserError(f"{file} is missing{hint or '; copy the folder again'}")
    try:
        require_regular(file)
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is damaged ({error}); copy it again") from None
