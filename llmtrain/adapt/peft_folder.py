"""Folders of adapters as peft (0.21) writes them: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmtrain.adapt.adapters import Unit
from llmtrain.adapt.lora import Lora
from llmtrain.adapt.peft_names import PublishedLayer, joined, published_layers
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import Family
from llmtrain.schema.adapt import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "llmtrain_base.json"
"""The checkpoint of ours that lies beneath, where there is one: peft's own file has a name alone."""
PREFIX = "base_model.model."


def write_peft(
    folder: Path,
    lora: Lora,
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    family: Family,
    base: Mapping[str, Any] | None,
) -> int:
    """Write a folder that exists. lora: after its conversion of a model of this config. tensors: of the adapters by name. Returns
    the bytes of tensors."""
    made, units = dict[str, Tensor](), dict[str, Unit]()
    layers = published_layers(config, family)
    for layer in layers:
        _, all_units = lora.adapters.get(layer.site.place, (layer.site, []))
        if not (covered := layer.covered(all_units)):
            continue
        place, key = layer.site.place, f"{PREFIX}{layer.module}"
        if layer.is_experts:
            units[layer.module] = all_units[0]
            both = {one.module for one in layers if one.is_experts and lora.adapters.get(one.site.place)}
            made |= _of_experts(layer, both, *(tensors[f"{place}.{name}"] for name in ("down", "up")))
            continue
        if layer.is_embedding:
            units[layer.module] = all_units[0]
            made[f"{key}.lora_embedding_A"] = tensors[f"{place}.down.weight"].t()
            made[f"{key}.lora_embedding_B"] = tensors[f"{place}.up.weight"]
            continue
        downs = dict(
            zip(
                [u.name for u in all_units],
                tensors[f"{place}.down.weight"].split([u.rank for u in all_units]),
                strict=True,
            )
        )
        ups = [tensors[f"{place}.up.{u.name}.weight"] for u in covered]
        unit, a, b = joined(layer, covered, [downs[u.name] for u in covered], ups)
        units[layer.module] = unit
        made |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        if lora.config.dora:
            made[f"{key}.lora_magnitude_vector"] = _magnitude(layer, covered, place, tensors)
    if lost := [
        site.name for site, _ in lora.adapters.values() if not any(one.site.place == site.place for one in layers)
    ]:
        raise UserError(
            f"{family.architecture} has no parameter like {', '.join(lost[:3])}, so that peft has no adapter of it; export the "
            "merged model (--merge)"
        )
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / WEIGHTS, {"format": "pt"})
    parameters = {layer.module for layer in layers if layer.is_experts}
    modules = [layer.module for layer in layers if not layer.is_experts]
    write_json(folder / CONFIG, _config(lora.config, units, modules, parameters, base))
    if base is not None:
        write_json(folder / BASE, dict(base))
    return sum(tensor.nbytes for tensor in made.values())


def parameter_keys(chosen: Collection[str]) -> dict[str, str]:
    """Names of parameters, of which adapters are -> those of the modules that peft wraps around their module one after another, in
    its order of parameters, which have the adapters: the first one's innermost."""
    modules: dict[str, list[str]] = {}
    for name in sorted(chosen, key=lambda name: name.endswith(".down_proj")):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        name: module + ".base_layer" * (len(names) - 1 - depth)
        for module, names in modules.items()
        for depth, name in enumerate(names)
    }


def _of_experts(layer: PublishedLayer, chosen: Collection[str], down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """peft's tensors: A [n * rank, columns] by expert, B [rows, rank * n] by place in the rank."""
    key, rows = f"{PREFIX}{parameter_keys(chosen)[layer.module]}", up.permute(1, 2, 0).flatten(1)
    return {f"{key}.lora_A.weight": down.flatten(0, 1), f"{key}.lora_B.weight": layer.published(rows)}


def _magnitude(layer: PublishedLayer, covered: Sequence[Unit], place: str, tensors: Mapping[str, Tensor]) -> Tensor:
    found = []
    for unit in covered:
        begin, end = max(unit.first, layer.first), min(unit.first + unit.rows, layer.first + layer.rows)
        found.append(tensors[f"{place}.magnitude.{unit.name}.weight"][begin - unit.first : end - unit.first])
    rows = torch.cat(found)
    if len(rows) != layer.rows:
        raise UserError(
            f"adapt.lora.dora: {layer.module} of the published class has adapters of some of its rows alone, of which peft has no "
            "norms; train with adapters of all of its parts"
        )
    return layer.published(rows)


def _config(
    config: LoraConfig,
    units: Mapping[str, Unit],
    modules: Sequence[str],
    parameters: Collection[str],
    base: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """adapter_config.json. modules, parameters: of all layers and of all experts' matrices that can have adapters."""
    of_modules = {name: unit for name, unit in units.items() if name not in parameters}
    of_parameters = sorted(name for name in units if name in parameters)
    power = 0.5 if config.rslora else 1.0
    alphas = {name: unit.scale * unit.rank**power for name, unit in units.items()}
    rank, alpha = most(unit.rank for unit in units.values()), most(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base["address"] if base else None,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": {name: unit.rank for name, unit in units.items() if unit.rank != rank},
        "alpha_pattern": {name: _whole(a) for name, a in alphas.items() if a != alpha},
        "target_modules": _shortened(of_modules, modules),
        **({"target_parameters": of_parameters} if of_parameters else {}),
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "lora_dropout": config.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _shortened(chosen: Mapping[str, Any], modules: Sequence[str]) -> list[str]:
    """Last parts of names, which peft takes for all modules that end so, where all of them are chosen."""
    last = {name: name.rpartition(".")[2] for name in modules}
    left = {last[name] for name in modules if name not in chosen}
    return sorted({name if last[name] in left else last[name] for name in chosen})


def most(values: Any) -> Any:
    return Counter(values).most_common(1)[0][0]


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
