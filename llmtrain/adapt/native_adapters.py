"""Adapters of uses of a shared block, merged into those that the published class has of each use, by joining their ranks: exact.

The class (models/hf/zamba2.py) adds up(down(x)) to the first product of the shared MLP, and to queries, keys and values, in each
use: two such maps side by side are one of the sum of their ranks. Ranks are the same in all uses; what is left of them is 0.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llmtrain.adapt.adapters import Unit
from llmtrain.models.config import ModelConfig, SharedAttentionBlock
from llmtrain.models.mixers.shared_attention import SharedInput

TARGETS = {"mlp_adapter": "mlp.w_in", "qkv_adapter": "mixer.wqkv"}
"""A native adapter's attribute in SharedInput, and the layer that it changes."""
_NATIVE = re.compile(r"(blocks\.\d+\.shared_input)\.(mlp_adapter|qkv_adapter)\.(down|up|up_[qkv])\.weight")
_ADAPTER = re.compile(r"(blocks\.\d+\.shared_input)\.lora\.(mlp\.w_in|mixer\.wqkv)")


def native_of(place: str, use: SharedInput) -> str | None:
    """Name of the native adapter that an adapter at this place can be merged into; None: there is none."""
    found = _ADAPTER.fullmatch(place)
    name = next((name for name, layer in TARGETS.items() if found and found[2] == layer), None)
    return None if found is None or name is None or getattr(use, name) is None else f"{found[1]}.{name}"


def ranks_needed(units: Sequence[Unit]) -> int:
    """Ranks that a native adapter needs more: of queries, keys and values, which have an A each, the largest."""
    ranks = [unit.rank for unit in units]
    return max(ranks) if units[0].name in ("q", "k", "v") else sum(ranks)


def widened(config: ModelConfig, ranks: int) -> ModelConfig:
    """The model with so many ranks more in its native adapters."""

    def wider(block: SharedAttentionBlock) -> SharedAttentionBlock:
        sizes = {name: getattr(block, name) for name in ("adapter_rank", "attn_adapter_rank")}
        return block.model_copy(update={name: size + ranks for name, size in sizes.items() if size is not None})

    blocks = {key: wider(one) if isinstance(one, SharedAttentionBlock) else one for key, one in config.blocks.items()}
    return config.model_copy(update={"blocks": blocks})


def joined(name: str, weights: Mapping[str, Tensor], units: Mapping[str, Sequence[Unit]], ranks: int) -> Tensor | None:
    """A native adapter's parameter with the adapters of its use beside it; None of other names.

    weights: it and the adapters' by name. units: by place, in the order of rows. ranks: those that are added.
    """
    if (found := _NATIVE.fullmatch(name)) is None:
        return None
    use, native, which = found.groups()
    place, own = f"{use}.lora.{TARGETS[native]}", weights[name]
    here = units.get(place, ())
    if which == "down":
        a = weights[f"{place}.down.weight"].split([unit.rank for unit in here]) if here else ()
        if native == "mlp_adapter":
            return _filled(torch.cat([own, *a]), 0, len(own) + ranks)
        of = {unit.name: down for unit, down in zip(here, a, strict=True)}
        each = own.chunk(3)
        parts = [torch.cat([one, of[x]]) if x in of else one for x, one in zip("qkv", each, strict=True)]
        return torch.cat([_filled(one, 0, len(each[0]) + ranks) for one in parts])
    columns = [own]
    for unit in here:
        if native == "mlp_adapter" or which == f"up_{unit.name}":
            up = unit.scale * weights[f"{place}.up.{unit.name}.weight"]
            first = unit.first if native == "mlp_adapter" else 0
            rows = up.new_zeros(len(own), unit.rank)
            rows[first : first + unit.rows] = up
            columns.append(rows)
    return _filled(torch.cat(columns, 1), 1, own.shape[1] + ranks)


def native_module(name: str, place: str, native: str) -> str:
    """The module of a native adapter with whose weights an adapter's parameter is merged."""
    part, *unit = name.removeprefix(f"{place}.").split(".")
    return f"{native}.{part}_{unit[0]}" if part == "up" and native.endswith("qkv_adapter") else f"{native}.{part}"


def _filled(matrix: Tensor, dim: int, size: int) -> Tensor:
    shape = list(matrix.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([matrix, matrix.new_zeros(shape)], dim)
