"""Low-rank adapters beside frozen weights (adapt.lora): which layers have which, and the weights that compute the same."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmtrain.adapt.adapters import WHOLE, Adapter, EmbeddingAdapter, Unit, adapted_class
from llmtrain.adapt.base import Converter
from llmtrain.adapt.expert_adapters import ExpertAdapter, adapted_experts
from llmtrain.adapt.native_adapters import TARGETS, joined, native_module, native_of, ranks_needed, widened
from llmtrain.config.report import nearest
from llmtrain.errors import UserError, first_few
from llmtrain.kernels.platform import Platform
from llmtrain.models.block import Block
from llmtrain.models.config import ModelConfig
from llmtrain.models.feed_forward.experts import ExpertWeights
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import clean_name
from llmtrain.models.layer_part import LayerPart
from llmtrain.models.layers import Embedding, Linear
from llmtrain.models.mixers.shared_attention import SharedInput
from llmtrain.schema.adapt import LoraConfig


@dataclass(frozen=True)
class Site:
    """A layer that adapters may change, or one use of a shared one.

    name: of the target. place: name of the module that has the adapter's parameters. use: that use's module, of which
    `lora.{path}` is the adapter; None: it is the layer's `lora`. default: it is adapted where no targets are given.
    """

    name: str
    layer: Linear | Embedding | ExpertWeights
    place: str
    use: nn.Module | None = None
    default: bool = True
    tied: bool = False
    """The layer's weights are those of another one too, which is not adapted."""
    matrix: str = "weight"
    """The parameter's name."""

    @property
    def weight(self) -> Tensor:
        return self.layer.get_parameter(self.matrix)

    @property
    def rows(self) -> int:
        """Rows of an adapter's output: of a linear layer, in the whole one."""
        if isinstance(self.layer, Linear):
            return self.layer.out_features
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        """Numbers that an adapter reads: of the whole layer."""
        if isinstance(self.layer, Linear):
            return self.layer.in_features
        return self.layer.n if isinstance(self.layer, Embedding) else self.weight.shape[2]

    def targets(self) -> dict[str, list[tuple[str, int, int]]]:
        """Adapters, each (name, first row, rows), by name of a target."""
        whole = [(WHOLE, 0, self.rows)]
        if not isinstance(self.layer, Linear):
            return {self.name: whole}
        parts, at = dict[str, tuple[str, int, int]](), 0
        for name, rows in zip(self.layer.names, self.layer.parts, strict=False):
            known = parts.get(name, (name, at, 0))
            parts[name] = (name, known[1], known[2] + rows)
            at += rows
        found = {f"{self.name}.{name}": [part] for name, part in parts.items()}
        return {self.name: whole if self.layer.whole else list(parts.values())} | found


def sites(model: HybridLM) -> Iterator[Site]:
    """All of a model, in its order; in `blocks` those of each layer as a token meets them."""
    yield Site("embed", model.embed, "embed.lora", default=False, tied=model.head is None)
    for i, block in enumerate(cast("list[Block]", model.blocks)):
        if (use := block.shared_input) is not None:
            prefix = f"blocks.{i}.shared_input"
            for part in ("mixer", "mlp"):
                for path, layer in _linears(getattr(use.shared, part)):
                    yield Site(f"{prefix}.{part}.{path}", layer, f"{prefix}.lora.{part}.{path}", use)
            yield Site(f"{prefix}.linear", use.linear, f"{prefix}.linear.lora")
        for part in (block.mixer, block.mlp):
            if part is not None:
                name = "mixer" if part is block.mixer else "mlp"
                for path, layer in _linears(part):
                    full = f"blocks.{i}.{name}.{path}"
                    yield Site(full, layer, f"{full}.lora")
                for path, layer in _experts(part):
                    full = f"blocks.{i}.{name}.{path}"
                    for matrix in ("w_in", "w_out"):
                        yield Site(f"{full}.{matrix}", layer, f"{full}.lora.{matrix}", default=False, matrix=matrix)
    if model.head is not None:
        yield Site("head", model.head, "head.lora", default=False)


def _linears(part: LayerPart) -> Iterator[tuple[str, Linear]]:
    return ((clean_name(name), one) for name, one in part.named_modules() if isinstance(one, Linear))


def _experts(part: LayerPart) -> Iterator[tuple[str, ExpertWeights]]:
    return ((clean_name(name), one) for name, one in part.named_modules() if isinstance(one, ExpertWeights))


class Lora(Converter):
    """See LoraConfig. `adapters` are those of the last model that was converted, by the place of their parameters."""

    def __init__(self, config: LoraConfig):
        self.config = config
        self.adapters: dict[str, tuple[Site, list[Unit]]] = {}
        self.layers: dict[str, str] = {}
        self.several: set[str] = set()
        self.native: dict[str, str] = {}

    def convert(self, model: HybridLM, platform: Platform) -> None:
        self.adapters = {site.place: (site, units) for site, units in self._chosen(list(sites(model)))}
        paths = {module: clean_name(name) for name, module in model.named_modules()}
        self.layers = {place: paths[site.layer] for place, (site, _) in self.adapters.items()}
        uses = Counter(one for use in model.shared_uses() for one in use.modules())
        self.several = {place for place, (site, _) in self.adapters.items() if uses[site.layer] > 1}
        self.native = {}
        for place in self.several if not self.config.dora else ():
            if (name := native_of(place, cast("SharedInput", self.adapters[place][0].use))) is not None:
                self.native[place] = name
        model.requires_grad_(False)
        for site, units in self.adapters.values():
            with site.weight.device:
                if isinstance(site.layer, Embedding):
                    self._add(site, EmbeddingAdapter(site.layer, units[0]))
                elif isinstance(site.layer, ExpertWeights):
                    self._add(site, ExpertAdapter(site.layer, site.matrix, units[0]))
                else:
                    self._add(site, Adapter(site.layer, units, self.config.dora, self.config.dropout))

    def _add(self, site: Site, adapter: nn.Module) -> None:
        if isinstance(site.layer, ExpertWeights):
            if not hasattr(site.layer, "lora"):
                site.layer.__class__ = adapted_experts(type(site.layer))
                site.layer.lora = nn.ModuleDict()
            cast("nn.ModuleDict", site.layer.lora)[site.matrix] = adapter
        elif site.use is None:
            site.layer.__class__ = adapted_class(type(site.layer))
            site.layer.lora = adapter
        else:
            _, part, path = site.place.rsplit(".", 2)
            of_use = cast("nn.ModuleDict", site.use.lora)
            if part not in of_use:
                of_use[part] = nn.ModuleDict()
            cast("nn.ModuleDict", of_use[part])[path] = adapter

    def _chosen(self, found: list[Site]) -> Iterator[tuple[Site, list[Unit]]]:
        """The layers with adapters, and these. Raises UserError for names that match nothing and ranks that are too large."""
        config, problems, chosen = self.config, list[str](), False
        names = {name: site for site in found for name in site.targets()}
        for setting, patterns in (("targets", config.targets or []), ("groups", [g.match for g in config.groups])):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    problems.append(f"adapt.lora.{setting}: {pattern} matches no layer; {_nearest(pattern, names)}")
        unused = set() if problems else {group.match for group in config.groups}
        for site in found:
            units = dict[str, Unit]()
            for target, adapters in site.targets().items():
                wanted = config.targets and any(fnmatchcase(target, pattern) for pattern in config.targets)
                if not (wanted or (config.targets is None and site.default and target == site.name)):
                    continue
                for name, first, rows in adapters:
                    full = target if name == WHOLE or target != site.name else f"{site.name}.{name}"
                    rank, grouped = (
                        config.rank_of(full, site.name),
                        [g for g in config.groups if g.is_of((full, site.name))],
                    )
                    unused -= {group.match for group in grouped}
                    least = min(rows, site.columns)
                    if rank <= least:
                        units[name] = Unit(
                            name, first, rows, rank, config.scale_of(full, site.name), _parts(site.layer, first, rows)
                        )
                    elif wanted or any(group.rank for group in grouped):
                        problems.append(
                            f"adapt.lora: {full} has {least} channels, fewer than rank {rank}; "
                            "give it a smaller one in adapt.lora.groups, or leave it out of targets"
                        )
            if WHOLE in units and len(units) > 1:
                problems.append(f"adapt.lora.targets: {site.name} and parts of it; name either")
            for setting in ("dora", "dropout") if units and isinstance(site.layer, ExpertWeights) else ():
                if getattr(config, setting):
                    text = f"adapt.lora.{setting}: not of experts ({site.name}), whose adapters change matrices as a whole; use "
                    problems.append(f"{text}{'false' if setting == 'dora' else 0}, or leave them out of targets")
            if units and config.dora and site.name in ("embed", "head"):
                problems.append(f"adapt.lora.dora: not of {site.name}; use false, or leave it out of targets")
            if units:
                chosen = True
                yield site, sorted(units.values(), key=lambda unit: unit.first)
        if unused and not problems:
            problems.append(
                f"adapt.lora.groups: {first_few(sorted(unused))}: no adapter is of it; add it to targets, or leave it out"
            )
        if not (chosen or problems):
            widest = max((min(site.rows, site.columns) for site in found if site.default), default=0)
            problems.append(f"adapt.lora.rank: no layer has so many channels, at most {widest}; give a smaller one")
        if problems:
            raise UserError("\n".join(problems))

    def begin(self, model: HybridLM) -> None:
        for module in model.modules():
            if isinstance(module, Adapter):
                module.begin()

    def module_of(self, name: str) -> str | None:
        place = self.place_of(name)
        return native_module(name, place, self.native[place]) if place in self.native else self.layers.get(place)

    def place_of(self, name: str) -> str:
        """The place of the adapter that has a parameter; "" of others."""
        while name and name not in self.adapters:
            name = name.rpartition(".")[0]
        return name

    @property
    def _native_ranks(self) -> int:
        return max((ranks_needed(self.adapters[place][1]) for place in self.native), default=0)

    def merged_config(self, config: ModelConfig) -> ModelConfig:
        return widened(config, self._native_ranks) if self.native else config

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        places = {name: self.place_of(name) for name in weights}
        found = {name: weight for name, weight in weights.items() if not places[name]}
        if self.native:
            units, ranks = {place: self.adapters[place][1] for place in self.native}, self._native_ranks
            wider = {name: joined(name, weights, units, ranks) for name in found}
            found |= {name: weight for name, weight in wider.items() if weight is not None}
        for place in dict.fromkeys(one for one in places.values() if one and one not in self.native):
            site, units = self.adapters[place]
            name = f"{self.layers[place]}.{site.matrix}"
            if place in self.several:
                raise UserError(
                    f"{self.layers[place]} is of a shared block, whose uses have adapters of their own; no weight computes what "
                    "these do. Export the adapters (without --merge), or train with targets that leave shared blocks out, but "
                    f"for {' and '.join(f'*.shared_input.{name}' for name in TARGETS.values())} without dora, which merge into "
                    "native adapters where the block has these (adapter_rank, attn_adapter_rank)"
                )
            if isinstance(site.layer, Embedding):
                if site.tied:
                    raise UserError(
                        "the embedding is the head's weight too, which has no adapter: no one weight computes what both do. Export "
                        "the adapters (without --merge)"
                    )
                down, up = weights[f"{place}.down.weight"], weights[f"{place}.up.weight"]
                found[name] = found[name] + units[0].scale * (down @ up.t())
            elif isinstance(site.layer, ExpertWeights):
                wide = torch.promote_types(found[name].dtype, torch.float32)
                down, up = (weights[f"{place}.{part}"].to(wide) for part in ("down", "up"))
                merged = torch.baddbmm(found[name].to(wide), up, down, alpha=units[0].scale)
                found[name] = merged.to(found[name].dtype)
            else:
                found[name] = self._merged(found[name], units, place, weights)
        return found

    def _merged(self, weight: Tensor, units: list[Unit], place: str, weights: Mapping[str, Tensor]) -> Tensor:
        """weight: [d_out, d_in], in fp32 while it is changed."""
        merged = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        downs = weights[f"{place}.down.weight"].split([unit.rank for unit in units])
        for unit, down in zip(units, downs, strict=True):
            rows = slice(unit.first, unit.first + unit.rows)
            merged[rows] += unit.scale * (weights[f"{place}.up.{unit.name}.weight"] @ down)
            if (magnitude := weights.get(f"{place}.magnitude.{unit.name}.weight")) is not None:
                merged[rows] *= (magnitude / merged[rows].norm(dim=1))[:, None]
        return merged.to(weight.dtype)


def _parts(layer: Linear | Embedding | ExpertWeights, first: int, rows: int) -> tuple[int, ...] | None:
    if not isinstance(layer, Linear) or not layer.parts:
        return None
    ends = list(itertools.accumulate(layer.parts))
    return tuple(n for n, end in zip(layer.parts, ends, strict=True) if first < end <= first + rows)


def _nearest(pattern: str, names: Mapping[str, Any]) -> str:
    """Names of targets near one that matches nothing: ends of names, as patterns have them."""
    ends = {f"*.{name.split('.', 3)[-1]}" if name.startswith("blocks.") else name: None for name in names}
    near = nearest(pattern, {**ends, **dict.fromkeys(names)})
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(ends)}"
