"""Initial weights that depend only on the seed, the parameter's name and the element's place in the whole tensor.

So 1, 2 or 8 ranks, any sharding and any device give the same model, and each rank computes only its shard.
Element i of a parameter gets a 64-bit hash of (seed, name, i), read as a uniform number in (0, 1), which the
parameter's rule maps to a value.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmtrain.models.slices import Slices, boxes, local_of, shards_of

Rule = Callable[[Tensor], Tensor]
"""Uniform numbers in (0, 1), float64 -> values, float64, of the same shape."""

_SLICE = 1 << 22  # elements computed at a time, to bound memory


@dataclass(frozen=True)
class InitScale:
    """Standard deviations of one model's projections and embeddings."""

    std: float | None
    """None: sqrt(2 / inputs) of each matrix."""
    residual: float
    """Factor for projections whose output is added to the residual stream, or to what a mixer reads of it."""

    def of(self, inputs: int, residual: bool = False) -> float:
        """The standard deviation of a matrix that sums over `inputs` channels."""
        std = math.sqrt(2 / inputs) if self.std is None else self.std
        return std * self.residual if residual else std


def normal(std: float) -> Rule:
    return lambda u: torch.erfinv(2 * u - 1) * (math.sqrt(2) * std)


def constant(value: float) -> Rule:
    return lambda u: torch.full_like(u, value)


def uniform(low: float, high: float) -> Rule:
    return lambda u: low + (high - low) * u


def log_of_uniform(low: float, high: float) -> Rule:
    """log(v) with v uniform in (low, high): Mamba-2's A_log."""
    return lambda u: torch.log(low + (high - low) * u)


def inverse_softplus_of_log_uniform(low: float, high: float) -> Rule:
    """b with softplus(b) log-uniform in (low, high): Mamba-2's dt_bias."""

    def rule(u: Tensor) -> Tensor:
        dt = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * u)
        return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus, without overflow

    return rule


def clean_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile put in."""
    return name.lstrip(".").replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


@torch.no_grad()
def init_weights(model: nn.Module, scale: InitScale, seed: int, names: Collection[str] | None = None) -> None:
    """Fills every parameter, or those of these names, in place: plain tensors, the local part of DTensors, or what a
    tensor-parallel rank holds.

    A module with parameters of its own says what they are in `init_rules(scale) -> {name: Rule}`.
    """
    for prefix, module in cast("Iterator[tuple[str, Any]]", model.named_modules()):
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        rules = module.init_rules(scale)
        assert own.keys() == rules.keys(), f"{prefix}: has {sorted(own)}, initialises {sorted(rules)}"
        divided = shards_of(module)
        for name, parameter in own.items():
            whole = clean_name(f"{prefix}.{name}")
            if names is None or whole in names:
                fill(parameter, rules[name], whole, seed, divided.get(name))


def fill(parameter: Tensor, rule: Rule, name: str, seed: int, slices: Slices | None = None) -> None:
    """Fills one parameter (or what this process holds of it) by its rule."""
    assert parameter.device.type != "meta", f"{name} has no memory yet; call to_empty() first"
    whole = slices.shape(parameter.shape) if slices else parameter.shape
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
    for begin, at, _ in boxes(parameter, slices):
        local = local_of(parameter)[at]
        rows_at_a_time = max(1, _SLICE // max(1, local[0].numel()))
        for start in range(0, local.shape[0], rows_at_a_time):
            part = local[start : start + rows_at_a_time]
            index = _global_index(part.shape, (begin[0] + start, *begin[1:]), whole, part.device)
            part.copy_(rule(_to_uniform(_splitmix64(index + key))))


def _global_index(shape: torch.Size, offset: tuple[int, ...], whole: torch.Size, device: torch.device) -> Tensor:
    """Row-major index in the whole tensor of each element of a box of it, int64."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, begin, extent in zip(shape, offset, whole, strict=True):
        index = index[..., None] * extent + torch.arange(begin, begin + size, device=device)
    return index


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN, _MIX_1, _MIX_2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _splitmix64(counter: Tensor) -> Tensor:
    """SplitMix64's output for each counter (Steele et al., OOPSLA 2014), in int64 that wraps around."""
    z = (counter + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: int64's own would copy the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _to_uniform(bits: Tensor) -> Tensor:
    """The top 52 bits as float64 in (0, 1); with 53 the half step could round up to 1."""
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52
