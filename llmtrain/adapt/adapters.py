"""Low-rank adapters of linear layers, the embedding and the head, as modules beside the weights that they change.

One adapter per published projection: of a fused linear layer each part may have its own A and B. The As stand one above another
in one matrix, so that a layer has two products more, whatever its number of parts.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant, normal, uniform
from llmtrain.models.layers import Embedding, Head, Linear
from llmtrain.models.slices import Slices, boxes, local_of, shard_parameter, shards_of

WHOLE = "whole"
"""The name of an adapter of all parts of a layer."""


class Unit(NamedTuple):
    """One adapter: of rows first .. first + rows - 1 of a layer's output, in the whole layer."""

    name: str
    first: int
    rows: int
    rank: int
    scale: float
    parts: tuple[int, ...] | None = None
    """Widths of the linear maps in these rows, as Linear's; None: one."""


class Down(Linear):
    """A: [sum of ranks, d_in]."""

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        bound = 1 / math.sqrt(self.in_features)
        return {"weight": uniform(-bound, bound)}


class Up(Linear):
    """B of one adapter: [rows, rank]."""

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(0.0)}


class Magnitude(nn.Module):
    """DoRA's trained norms [rows] of the rows of W + scale * B A. Read as an attribute."""

    def __init__(self, rows: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(1.0)}  # Adapter.begin has the norms


class Adapter(nn.Module):
    """(x, y = linear(x)) -> y + scale * up(down(x)), part by part; with DoRA the rows are then scaled to trained norms.

    linear: on the meta device, after tensor-parallel ranks divided it. units: in the order of their rows.
    """

    def __init__(self, linear: Linear, units: Sequence[Unit], dora: bool = False, dropout: float = 0.0):
        super().__init__()
        self.units, self.dropout = list(units), dropout
        self._linear = (linear,)  # registered once, where it is
        self._parts = _row_parts(linear, units)
        ranks = [unit.rank for unit in units]
        self.down = Down(linear.in_features, sum(ranks), parts=ranks)
        self.up = nn.ModuleDict({unit.name: Up(unit.rank, unit.rows, parts=unit.parts) for unit in units})
        self.magnitude = nn.ModuleDict({unit.name: Magnitude(unit.rows) for unit in units} if dora else {})
        divided = shards_of(linear).get("weight")
        if divided is not None and divided.dim == 1:
            shard_parameter(self.down, "weight", divided)
        elif divided is not None:
            for unit in units:
                slices = _rows_of(divided, unit)
                for module in (self.up[unit.name], *([self.magnitude[unit.name]] if dora else [])):
                    shard_parameter(module, "weight", slices)

    @property
    def linear(self) -> Linear:
        return self._linear[0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.down(F.dropout(x, self.dropout, self.training))
        if self.linear.summing is not None:
            h = self.linear.summing.leave(h)  # the ranks' sums of a few channels, rather than of the layer's outputs
        up = self._up()
        if not self.magnitude:
            return y + F.linear(h, up)
        change = self._rows({unit.name: self._norm_change(unit) for unit in self.units}, 0.0)
        bias = self.linear.bias
        base = y if bias is None else y - bias.to(y.dtype)
        return y + change.to(y.dtype) * base + ((1 + change).to(y.dtype)) * F.linear(h, up)

    def _up(self) -> Tensor:
        """[rows of the layer, sum of ranks], with the scales: B of each part on a diagonal of blocks."""
        total, before, found = sum(unit.rank for unit in self.units), 0, {}
        for unit in self.units:
            scaled = cast("Tensor", self.up[unit.name].weight) * unit.scale
            found[unit.name] = F.pad(scaled, (before, total - before - unit.rank)) if unit.rank < total else scaled
            before += unit.rank
        return self._rows(found, 0.0)

    def _rows(self, found: dict[str, Tensor], fill: float) -> Tensor:
        """The parts' rows one after another, with `fill` where no adapter is."""
        some = next(iter(found.values()))
        parts = [found[name] if name else some.new_full((n, *some.shape[1:]), fill) for name, n in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _norm_change(self, unit: Unit) -> Tensor:
        """The factor of the rows of one part, less 1, in fp32: gradients go to the trained norms alone."""
        norms = self._norms(unit)
        return cast("Tensor", self.magnitude[unit.name].weight) / norms - 1

    @torch.no_grad()
    def _norms(self, unit: Unit) -> Tensor:
        weight = self.linear.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        rows, at = self._rows_at(unit.name), sum(u.rank for u in self.units[: self.units.index(unit)])
        down = self.down.weight[at : at + unit.rank]
        added = cast("Tensor", self.up[unit.name].weight).to(wide) @ down.to(wide)
        squares = (weight[rows].to(wide) + unit.scale * added).square().sum(1)
        if self.linear.summing is not None:
            squares = self.linear.summing.total(squares)
        return squares.sqrt()

    def _rows_at(self, name: str) -> slice:
        at = 0
        for part, n in self._parts:
            if part == name:
                return slice(at, at + n)
            at += n
        raise KeyError(name)

    @torch.no_grad()
    def begin(self) -> None:
        """Set DoRA's norms to those of the layer as it is. Every rank calls it."""
        for unit in self.units if self.magnitude else ():
            weight, parameter = self.linear.weight, cast("Tensor", self.magnitude[unit.name].weight)
            whole = cast("Any", weight).full_tensor() if hasattr(weight, "full_tensor") else weight
            wide = torch.promote_types(whole.dtype, torch.float32)
            squares = whole[self._rows_at(unit.name)].to(wide).square().sum(1)
            if self.linear.summing is not None:
                squares = self.linear.summing.total(squares)
            for box in boxes(parameter):
                local_of(parameter)[box.at] = squares.sqrt()[box.begin[0] : box.begin[0] + box.sizes[0]]

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        ups = (cast("Linear", up).flops(seq_len) for up in self.up.values())
        return sum(ups, self.down.flops(seq_len))


def _pieces(divided: Slices, unit: Unit) -> list[Any]:
    return [piece for piece in divided.pieces if unit.first <= piece.begin < unit.first + unit.rows]


def _rows_of(divided: Slices, unit: Unit) -> Slices:
    """This rank's rows of one part, by those of the layer."""
    found = [piece._replace(begin=piece.begin - unit.first) for piece in _pieces(divided, unit)]
    return Slices(0, unit.rows, tuple(found))


def _row_parts(linear: Linear, units: Sequence[Unit]) -> list[tuple[str, int]]:
    """(name, rows of this rank) of all parts of a layer's output in order; no name where no adapter is."""
    divided = shards_of(linear).get("weight")
    whole = linear.out_features

    def local(first: int, rows: int) -> int:
        if divided is None or divided.dim == 1:
            return rows
        return sum(piece.length for piece in divided.pieces if first <= piece.begin < first + rows)

    parts, at = [], 0
    for unit in units:
        parts += [("", local(at, unit.first - at)), (unit.name, local(unit.first, unit.rows))]
        at = unit.first + unit.rows
    parts.append(("", local(at, whole - at)))
    return [(name, rows) for name, rows in parts if rows]


class _AdaptedLinear(Linear):
    """The first base of an adapted layer's class, whatever kind it was."""

    lora: Adapter

    def forward(self, input: Tensor) -> Tensor:
        return self.lora(input, super().forward(input))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return super().flops(seq_len, causal) + self.lora.flops(seq_len)


class _AdaptedHead(Head):
    """A head of weights W + scale * B A, which are computed once a pass: losses read a matrix."""

    lora: Adapter

    def matrix(self) -> Tensor:
        [unit], down = self.lora.units, self.lora.down.weight
        up = cast("Tensor", self.lora.up[unit.name].weight)
        return self.weight + (up @ down) * unit.scale

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        adapters = [2 * seq_len * unit.rank * (self.in_features + self.out_features) for unit in self.lora.units]
        return super().flops(seq_len, causal) + Flops.with_weight(Work(head=sum(adapters)), True)


class EmbeddingAdapter(nn.Module):
    """Rows A [n, rank] looked up, times B [d, rank]; at first A is 0."""

    def __init__(self, embedding: Embedding, unit: Unit):
        super().__init__()
        self.units = [unit]
        n, d = embedding.n, embedding.weight.shape[1]
        self.down, self.up = EmbeddingRows(n, unit.rank), EmbeddingUp(unit.rank, d)
        if (divided := shards_of(embedding).get("weight")) is not None:
            shard_parameter(self.down, "weight", divided)

    def forward(self, rows: Tensor) -> Tensor:
        return self.up(F.embedding(rows, self.down.weight)) * self.units[0].scale

    def begin(self) -> None:
        """Nothing of the layer's weights."""


class EmbeddingRows(nn.Module):
    """A: [n, rank]."""

    def __init__(self, n: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, rank))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(0.0)}


class EmbeddingUp(Linear):
    """B: [d, rank]."""

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": normal(1.0)}


class _AdaptedEmbedding(Embedding):
    lora: EmbeddingAdapter

    def look_up(self, rows: Tensor) -> Tensor:
        return super().look_up(rows) + self.lora(rows)


_BASES: dict[type, type] = {Head: _AdaptedHead, Embedding: _AdaptedEmbedding}


@functools.cache
def adapted_class(kind: type) -> type[Any]:
    """The class of a layer of this kind with an adapter as its attribute `lora`."""
    return type(f"Adapted{kind.__name__}", (_BASES.get(kind, _AdaptedLinear), kind), {})
