"""AdamW with the moments of matrices in 8 bits (Dettmers et al., arXiv:2110.02861), by torchao's dynamic quantization.

A row of a matrix is quantized by itself, in blocks of `BLOCK` neighbours that share a scale. FSDP2 shards rows, so that codes and
scales are the same on any number of ranks, and checkpoints hold them as they are.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from llmtrain.errors import UserError
from llmtrain.models.parameters import Parameters
from llmtrain.models.slices import local_of
from llmtrain.schema.optimizers import AdamW8bitConfig
from llmtrain.train.optimizers.adamw import AdamWBesideMatrices

BLOCK = 256
"""Neighbours in a row that share a scale; what is left of a row, and a shorter row, is a block too."""
_ELEMENTS_AT_ONCE = 2**24
"""Of a matrix's rows that are stepped together: both moments are in fp32 meanwhile."""
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Signed or not."""


def build(config: AdamW8bitConfig, groups: list[dict[str, Any]], parameters: Parameters) -> AdamW8bit:
    """Raises UserError without torchao."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError("optimizer.type adamw_8bit needs torchao: pip install 'llmtrain[float8]'")
    return AdamW8bit(groups, parameters, config)


class AdamW8bit(AdamWBesideMatrices):
    """Steps its groups of matrices with moments in 8 bits, the others as AdamW does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called when a state is loaded, for which PyTorch makes everything what the parameter is: fp32, which holds each code."""
        super().__setstate__(state)
        for found in self.state.values():
            for name in [name for name in found if name.endswith("_codes")]:
                found[name] = found[name].to(torch.uint8)

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            beta1, beta2 = group["betas"]
            # A tensor: numbers would be part of the compiled code, and the learning rate changes at each step.
            numbers = torch.tensor([group["lr"], group["weight_decay"], beta1, beta2, group["eps"]])
            numbers = numbers.to(_local(group["params"][0]).device)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, numbers)

    def _step_matrix(self, parameter: nn.Parameter, numbers: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            self._begin(parameter)
        state["step"] += 1
        weight, gradient = _local(parameter), _local(cast("Tensor", parameter.grad))
        moments = [_local(state[name + part]) for name in _MOMENTS for part in ("_codes", "_scales")]
        rows = max(_ELEMENTS_AT_ONCE // weight.shape[-1], 1)
        # Matrices of several experts are rows one after another.
        for targets in zip(*(t.flatten(0, -2).split(rows) for t in (weight, gradient, *moments)), strict=True):
            if targets[0].numel():  # of a rank that has no row
                self._step_rows(targets, state["step"], numbers)

    def _step_rows(self, targets: tuple[Tensor, ...], step: Tensor, numbers: Tensor) -> None:
        """targets: weight, gradient, and the codes and scales of both moments."""
        weight, gradient, m_codes, m_scales, v_codes, v_scales = targets
        columns = weight.shape[1]
        m, v = (in_blocks(codes, zero) for codes, zero in zip((m_codes, v_codes), _zero_codes(), strict=True))
        moments = [m, m_scales.flatten(), v, v_scales.flatten()]
        given = in_blocks(weight), in_blocks(gradient)
        if weight.is_cuda:
            for tensor in (*given, *moments):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one compilation for matrices of all sizes
        update = _compiled_update() if weight.is_cuda else adamw_update
        found = update(*given, moments, step, numbers, _maps(weight.device))
        for target, value in zip((weight, m_codes, m_scales, v_codes, v_scales), found, strict=True):
            target.copy_(value.view(len(target), -1)[:, : columns if value.dim() == 2 else None])

    def _begin(self, parameter: nn.Parameter) -> None:
        """Moments of 0, which have any code and the scale 0."""
        local, state = _local(parameter), self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        blocks = -(-local.shape[-1] // BLOCK)
        for name in _MOMENTS:
            codes = torch.zeros_like(local, dtype=torch.uint8)
            scales = local.new_zeros((*local.shape[:-1], blocks), dtype=torch.float32)
            state[f"{name}_codes"], state[f"{name}_scales"] = _as(parameter, codes), _as(parameter, scales)


def adamw_update(
    weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, numbers: Tensor, maps: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The weight after a step, then the moments.

    weight, gradient: [blocks, BLOCK]. moments: codes [blocks, BLOCK] and scales [blocks] of the average of gradients, then of
    that of their squares. step: the number of this step. numbers: lr, weight decay, both betas, eps. maps: the values [256] of
    signed and of unsigned codes.
    """
    m_codes, m_scales, v_codes, v_scales = moments
    signed, unsigned = maps
    lr, decay, beta1, beta2, eps = numbers.unbind()
    gradient = gradient.float()
    m = dequantized(m_codes, m_scales, signed).lerp(gradient, 1 - beta1)
    v = dequantized(v_codes, v_scales, unsigned).lerp(gradient * gradient, 1 - beta2)
    root = v.sqrt() / (1 - beta2**step).sqrt() + eps
    stepped = weight * (1 - lr * decay) - lr / (1 - beta1**step) * m / root
    return stepped.to(weight.dtype), *quantized(m, signed), *quantized(v, unsigned)


def quantized(blocks: Tensor, code_map: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, BLOCK] as codes of the same shape, and the largest magnitude of each block [blocks].

    Where the map has no negative value, what is above 0 stays so: the root of an average square is divided by.
    """
    scales = blocks.abs().amax(-1)
    scaled = blocks / scales.clamp(min=1e-38)[:, None]
    codes = nearest(scaled, code_map)
    return torch.where((scaled > 0) & (code_map[0] == 0), codes.clamp(min=1), codes), scales


def nearest(x: Tensor, code_map: Tensor) -> Tensor:
    """The code, of uint8, of the value in the map that is nearest to each number; the larger of two that are as near.

    As torchao's quantize_8bit_with_qmap, whose search, one step after another, takes the compiler minutes.
    """
    below = (torch.bucketize(x, code_map, right=True) - 1).clamp(min=0)
    above = (below + 1).clamp(max=len(code_map) - 1)
    value = code_map[below]
    return torch.where(x - value >= (code_map[above] - value) * 0.5, above, below).to(torch.uint8)


def dequantized(codes: Tensor, scales: Tensor, code_map: Tensor) -> Tensor:
    """The fp32 values [blocks, BLOCK] of codes and the scales of their blocks."""
    return code_map[codes.int()] * scales[:, None]


def in_blocks(x: Tensor, filler: int = 0) -> Tensor:
    """[rows, columns] -> [blocks, BLOCK], those of a row one after another, the last one filled up: without a copy where BLOCK
    divides the columns. Rows that the compiler would divide take it minutes."""
    rest = -x.shape[1] % BLOCK
    return (F.pad(x, (0, rest), value=filler) if rest else x).view(-1, BLOCK)


@functools.cache
def _values() -> tuple[list[float], ...]:
    from torchao.optim.quant_utils import create_dynamic_map

    return tuple(create_dynamic_map(signed) for signed in _MOMENTS.values())


def _zero_codes() -> list[int]:
    """The code of 0 in each map."""
    return [values.index(0.0) for values in _values()]


@functools.cache
def _maps(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(values, device=device) for values in _values())


@functools.cache
def _compiled_update() -> Callable[..., tuple[Tensor, ...]]:
    return torch.compile(adamw_update, fullgraph=True)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows, without the wrapper through which FSDP2 gathers a weight in float8."""
    local = local_of(tensor)
    if is_traceable_wrapper_subclass(local):
        (inner, *_), _ = local.__tensor_flatten__()
        local = getattr(local, inner)
    return local


def _as(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """Rows that belong to this rank's rows of a parameter, sharded as it is."""
    if not isinstance(parameter, DTensor):
        return local
    shape = (parameter.shape[0], *local.shape[1:])
    mesh, placements = parameter.device_mesh, parameter.placements
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
