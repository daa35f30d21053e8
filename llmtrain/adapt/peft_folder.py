"""Folders of adapters as peft (0.21) writes them: adapter_config.json and adapter_model.safetensors."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
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
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, folder / WEIGHTS, {"format": "pt"})
    _write_json(folder / CONFIG, _config(lora.config, units, [layer.module for layer in layers], base))
    if base is not None:
        _write_json(folder / BASE, dict(base))
    return sum(tensor.nbytes for tensor in made.values())


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
    config: LoraConfig, units: Mapping[str, Unit], modules: Sequence[str], base: Mapping[str, Any] | None
) -> dict[str, Any]:
    """adapter_config.json. modules: of all layers that can have adapters."""
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
        "target_modules": _shortened(units, modules),
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


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
