"""The kernels of cached decoding as a problem for the compilers of bench/tune: called with tensors without memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


@dataclass(frozen=True)
class Case:
    """fields: of the operation's spec; capacity: slots of the cache."""

    operation: str
    fields: dict[str, Any]
    batch: int
    capacity: int


class Problem:
    def __init__(self, case: Case, device: str, where: Platform):
        self.case, self.device, self.where = case, device, where

    def runner(self, part: str, launch: None) -> Callable[[], Any]:
        return self._call

    def _call(self) -> None:
        fields, batch = self.case.fields, self.case.batch

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        def half(*shape: int) -> Tensor:
            return empty(*shape, dtype=getattr(torch, fields.get("dtype", "bfloat16")))

        family = self.case.operation.removesuffix("_step")
        build = importlib.import_module(f"llmtrain.kernels.{family}.step_triton").build
        if family == "attention":
            spec = AttentionSpec(**fields)
            cache = half(batch, spec.n_kv_heads, self.case.capacity, spec.head_dim)
            position, first = empty(1, dtype=torch.int64), empty(batch, dtype=torch.int32)
            build(spec, self.where, "")(half(batch, spec.n_heads, spec.head_dim), cache, cache, position, first)
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
