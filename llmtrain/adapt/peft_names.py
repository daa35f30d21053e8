"""Correspondence of adapters and those that peft (0.21) has of the published class: names, and which rows are whose."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmtrain.adapt.adapters import Unit
from llmtrain.adapt.base import meta_model
from llmtrain.adapt.lora import Site, sites
from llmtrain.models.config import ModelConfig
from llmtrain.models.feed_forward.experts import ExpertWeights
from llmtrain.models.hf.family import Family, Part, Weight
from llmtrain.models.layers import Embedding


@dataclass(frozen=True)
class PublishedLayer:
    """A layer of the published class in memory, and the rows of a layer of ours (or of one use) that it is.

    module: its name, as peft's. others: further spellings. first: of the rows; `part.shape` has their number.
    """

    module: str
    others: tuple[str, ...]
    site: Site
    part: Part
    first: int

    @property
    def rows(self) -> int:
        return self.site.rows if self.is_embedding or self.is_experts else self.part.shape[0]

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.site.layer, Embedding)

    @property
    def is_experts(self) -> bool:
        """A parameter of all experts (peft's target_parameters): `module` ends with its name."""
        return isinstance(self.site.layer, ExpertWeights)

    def covered(self, units: Sequence[Unit]) -> list[Unit]:
        """Adapters of the layer that change some of these rows."""
        return [u for u in units if u.first < self.first + self.rows and self.first < u.first + u.rows]

    def published(self, rows: Tensor) -> Tensor:
        """Rows in our order -> in the class' order; [rows, ...]."""
        return self._part(rows).unflatten(rows.reshape(-1))

    def ours(self, rows: Tensor) -> Tensor:
        """The inverse of `published`."""
        return self._part(rows).flatten(rows).view(rows.shape)

    def _part(self, rows: Tensor) -> Part:
        return replace(self.part, shape=tuple(rows.shape), transposed=False, rows=0)


def published_layers(config: ModelConfig, family: Family) -> list[PublishedLayer]:
    """Every layer that can have an adapter, in the model's order. On the meta device."""
    model = meta_model(config)
    paths = {module: name for name, module in model.named_modules()}
    weights = {weight.ours: weight for weight in family.weights(config)}
    found, uses = list[PublishedLayer](), Counter[str]()
    for site in sites(model):
        ours = f"{paths[site.layer]}.{site.matrix}"
        if isinstance(site.layer, ExpertWeights):
            name, *others = _experts_in_memory(weights[ours], site)
            found.append(PublishedLayer(name, tuple(others), site, weights[ours].parts[0], 0))
            continue
        use, first = uses[ours], 0
        uses[ours] += 1
        for part in weights[ours].parts:
            name, *others = _in_memory(part, ours, use if site.use is not None else None)
            found.append(PublishedLayer(name, tuple(others), site, part, first))
            first += part.shape[0]
    return found


def _in_memory(part: Part, ours: str, use: int | None) -> list[str]:
    """Names of the module in memory, the first as transformers 5 has it. use: number of the use of a shared layer, whose names in
    files are those of all uses."""
    if use is not None:
        return [part.names[use].removesuffix(".weight")]
    usual = [name for name in part.names if name.startswith("lm_head" if ours == "head.weight" else "model.")]
    names = dict.fromkeys([*([part.in_memory] if part.in_memory else []), *usual, *part.names])
    if ours != "head.weight":
        names = {name: None for name in names if name != "lm_head.weight"}
    return [name.removesuffix(".weight") for name in names]


def _experts_in_memory(weight: Weight, site: Site) -> list[str]:
    """Names of the parameter in memory that transformers 5 has of all experts, the first as it has it."""
    assert isinstance(site.layer, ExpertWeights)
    gated = len(site.layer.parts["w_in"]) > 1
    name = "down_proj" if site.matrix == "w_out" else "gate_up_proj" if gated else "up_proj"
    found = dict[str, None]()
    for published in sorted(weight.parts[0].names, key=lambda one: not one.startswith("model.")):
        module, of_each, _ = published.partition(".experts.")
        if not of_each:
            module = published.removesuffix(".weight").rpartition(".")[0]
        elif module.endswith(".block_sparse_moe"):  # in files alone
            found[f"{module.removesuffix('.block_sparse_moe')}.mlp.experts.{name}"] = None
        found[f"{module}.experts.{name}"] = None
    return list(found)


def joined(
    layer: PublishedLayer, units: Sequence[Unit], downs: Sequence[Tensor], ups: Sequence[Tensor]
) -> tuple[Unit, Tensor, Tensor]:
    """One adapter of a published layer from those of its rows: (rank and scale as a Unit, A [rank, d_in], B [rows, rank]).

    Where they have one A, as after an import, it is theirs; otherwise their As stand one above another.
    """
    first, alike = units[0], all(torch.equal(downs[0], down) for down in downs[1:])
    alike = alike and all(unit.scale == units[0].scale for unit in units)
    rank = first.rank if alike else sum(unit.rank for unit in units)
    up, at = downs[0].new_zeros(layer.rows, rank), 0
    for unit, b in zip(units, ups, strict=True):
        begin, end = max(unit.first, layer.first), min(unit.first + unit.rows, layer.first + layer.rows)
        rows = b[begin - unit.first : end - unit.first]
        up[begin - layer.first : end - layer.first, at : at + unit.rank] = (
            rows if alike else rows * (unit.scale / first.scale)
        )
        at += 0 if alike else unit.rank
    whole = Unit(first.name, layer.first, layer.rows, rank, first.scale)
    return whole, downs[0] if alike else torch.cat(list(downs)), layer.published(up)
