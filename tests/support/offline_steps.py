"""Kernels without tuning tables for the compilers of bench/tune: called with tensors without memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.prefix_tree import BLOCK_QUERIES
from llmtrain.kernels.attention.prefix_tree_triton import merge_ancestors
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.prefix_tree_triton import prefix_tree_conv
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.prefix_tree import ScanSchedule
from llmtrain.kernels.ssd.prefix_tree_triton import launch_for, prefix_tree_scan
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class Case:
    """fields: of the operation's spec; capacity: slots of the cache. page: slots of a page, where it has some."""

    operation: str
    fields: dict[str, Any]
    batch: int
    capacity: int
    page: int | None = None


def _attention(
    head_dim: int, group: int = 1, batch: int = 1, capacity: int = 1920, page: int | None = None, **more: Any
) -> Case:
    fields = {"n_heads": 8 * group, "n_kv_heads": 8, "head_dim": head_dim, "scale": 0.1, **more}
    return Case("attention_step", fields, batch, capacity, page)


def _tree(head_dim: int, group: int = 1, **more: Any) -> Case:
    fields = {"n_heads": 8 * group, "n_kv_heads": 8, "head_dim": head_dim, "scale": 0.1, **more}
    return Case("attention_prefix_tree", fields, 1, 4096)


def _ssd(head_dim: int, d_state: int, batch: int = 1) -> Case:
    return Case("ssd_step", _scan(head_dim, d_state), batch, 0)


def _ssd_tree(head_dim: int, d_state: int, **more: Any) -> Case:
    return Case("ssd_prefix_tree", _scan(head_dim, d_state) | more, 1, 4096)


def _scan(head_dim: int, d_state: int) -> dict[str, Any]:
    return {"n_heads": 64, "head_dim": head_dim, "d_state": d_state, "n_groups": 1, "chunk_size": 256}


_EVERYTHING = {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0}
# Batch 600 needs no splits of the cache, batch 1 the most.
CASES = {
    "64": _attention(64, batch=64),
    "128": _attention(128, batch=64),
    "128, no splits": _attention(128, batch=600),
    "160": _attention(160),
    "224, fp32": _attention(224, dtype="float32"),
    "everything, 256": _attention(256, **_EVERYTHING),
    "gqa, 64": _attention(64, 4, 64, 16384),
    "gqa, 128": _attention(128, 4, 64, 16384),
    "gqa, 160": _attention(160, 4),
    "gqa, 256, fp32": _attention(256, 4, dtype="float32"),
    "everything, 5 heads to one, 224": _attention(224, 5, **_EVERYTHING),
    "everything, 40 heads to one, 256": _attention(256, 40, **_EVERYTHING),
    "128, pages": _attention(128, batch=64, page=32),
    "gqa, 64, pages": _attention(64, 4, 64, 16384, 32),
    "gqa, 128, pages": _attention(128, 4, 64, 16384, 32),
    "everything, 5 heads to one, 224, pages": _attention(224, 5, page=32, **_EVERYTHING),
    "64 x 128": _ssd(64, 128, 64),
    "64 x 64": _ssd(64, 64),
    "tree, 64": _tree(64),
    "tree, 128, alibi": _tree(128, alibi_max_bias=8.0),
    "tree, gqa, 112, softcap": _tree(112, 4, softcap=30.0),
    "tree, 160": _tree(160),
    "tree, 256, alibi": _tree(256, alibi_max_bias=8.0),
    "tree, 64, fp32": _tree(64, dtype="float32"),
    "tree, 48, fp32": _tree(48, dtype="float32"),
    "tree, 128, fp32": _tree(128, dtype="float32"),
    "tree, 64 x 64": _ssd_tree(64, 64),
    "tree, 64 x 128, limits": _ssd_tree(64, 128, dt_limit=(0.001, 0.1)),
    "tree, 80 x 16": _ssd_tree(80, 16),
    "tree, 128 x 256": _ssd_tree(128, 256),
    "tree, 64 x 64, fp32": _ssd_tree(64, 64, dtype="float32"),
    "tree, 64 x 128, fp32": _ssd_tree(64, 128, dtype="float32"),
    "tree, 128 x 256, fp32": _ssd_tree(128, 256, dtype="float32"),
    "4352 channels": Case("conv1d_step", {"channels": 4352, "width": 4}, 64, 0),
    "tree, 4224 channels": Case("conv1d_prefix_tree", {"channels": 4224, "width": 4}, 1, 4096),
    "tree, 4224 channels, fp32": Case(
        "conv1d_prefix_tree", {"channels": 4224, "width": 4, "dtype": "float32"}, 1, 4096
    ),
}


class Steps:
    """In place of an operation of kernels/operation.py, with its search."""

    def shape(self, fields: dict[str, Any]) -> Case:
        return Case(**fields)

    def search(self, case: Case, device: str, where: Platform) -> Steps:
        self.case, self.device, self.where = case, device, where
        return self

    def runner(self, part: str, launch: None) -> Callable[[], Any]:
        return self._call

    def _call(self) -> None:
        fields, batch = self.case.fields, self.case.batch

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        def half(*shape: int) -> Tensor:
            return empty(*shape, dtype=getattr(torch, fields.get("dtype", "bfloat16")))

        if self.case.operation == "attention_prefix_tree":
            spec, tokens = AttentionSpec(**fields), self.case.capacity
            q, k = half(1, tokens, spec.n_heads, spec.head_dim), half(1, tokens, spec.n_kv_heads, spec.head_dim)
            starts, ends, distance_offset = (empty(tokens, dtype=torch.int32) for _ in range(3))
            slopes = None if spec.alibi_max_bias is None else empty(spec.n_heads)
            tiles = empty(tokens // BLOCK_QUERIES, dtype=torch.int32)
            lse = empty(1, spec.n_heads, tokens)
            merge_ancestors(q, k, k, q, lse, spec, slopes, starts, ends, distance_offset, tiles, self.where.vendor)
            return
        if self.case.operation == "ssd_prefix_tree":
            spec, tokens = SSDSpec(**fields), self.case.capacity
            heads, shared = empty(spec.n_heads), half(1, tokens, spec.n_groups, spec.d_state)
            x, dt = half(1, tokens, spec.n_heads, spec.head_dim), half(1, tokens, spec.n_heads)
            integers = partial(empty, dtype=torch.int32)
            made = ScanSchedule(
                [integers(9, 5)], integers(9, 2), integers(9, launch_for(spec, self.where).chunk_size), 9
            )
            prefix_tree_scan(x, dt, heads, shared, shared, heads, heads, made, spec, self.where)
            return
        if self.case.operation == "conv1d_prefix_tree":
            spec, tokens = Conv1dSpec(**fields), self.case.capacity
            weight, bias = half(spec.channels, spec.width), half(spec.channels)
            before = empty(tokens, spec.width - 1, dtype=torch.int32)
            prefix_tree_conv(half(1, tokens, spec.channels), weight, bias, before, self.where.vendor)
            return
        family = self.case.operation.removesuffix("_step")
        build = importlib.import_module(f"llmtrain.kernels.{family}.step_triton").build
        if family == "attention":
            spec = AttentionSpec(**fields)
            count, size, pages = batch, self.case.capacity, None
            if self.case.page is not None:
                pages = empty(batch, size // self.case.page, dtype=torch.int32)
                count, size = pages.numel() + 1, self.case.page
            cache = half(count, spec.n_kv_heads, size, spec.head_dim)
            position, first = empty(1, dtype=torch.int64), empty(batch, dtype=torch.int32)
            q = half(batch, spec.n_heads, spec.head_dim)
            build(spec, self.where, "")(q, cache, cache, position, first, pages=pages)
        elif family == "ssd":
            spec = SSDSpec(**fields)
            heads, shared = empty(spec.n_heads), half(batch, spec.n_groups, spec.d_state)
            state = empty(batch, spec.n_heads, spec.head_dim, spec.d_state)
            x, dt = half(batch, spec.n_heads, spec.head_dim), half(batch, spec.n_heads)
            build(spec, self.where, "")(x, dt, heads, shared, shared, heads, heads, state)
        else:
            spec = Conv1dSpec(**fields)
            window = half(batch, spec.width - 1, spec.channels).transpose(1, 2)
            weight, bias = half(spec.channels, spec.width), half(spec.channels)
            build(spec, self.where, "")(half(batch, spec.channels), window, weight, bias)


OPERATION = Steps()
