"""Delta rules by operators: how they are called, the form of their gradients, and arguments of their kernels' launches."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.gated_delta.triton_launch import Tile
from llmtrain.kernels.operators import call, register_autograd

INPUTS = 7
"""q, k, v, log_decay, beta, the initial state and document_ids; what follows them are settings."""


class OperatorRule:
    """The signature of ReferenceGatedDelta, or ReferenceKimiDelta, by an operator of INPUTS tensors and settings. document_ids may
    also fall. q, k and v may be slices of a projection."""

    def __init__(self, operator: Any, *settings: Any):
        self.operator, self.settings = operator, settings

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y like v, and the last state in fp32."""
        return call(self.operator, q, k, v, log_decay, beta, initial_state, document_ids, *self.settings)[:2]


def differentiable(forward: Any, backward: Any, kept: Callable[..., Iterable[Tensor]]) -> None:
    """Register the fakes of both operators, and the forward's gradient. forward: of INPUTS tensors and settings, to y, the last
    state and what `backward` takes after the tensors and before the settings, of which `kept` makes as much: a function of k, v,
    log_decay and the settings."""

    @torch.library.register_fake(forward)
    def _(q, k, v, log_decay, beta, initial_state, document_ids, *settings):
        final = v.new_empty((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), dtype=torch.float32)
        return v.new_empty(v.shape), final, *kept(k, v, log_decay, *settings)

    @torch.library.register_fake(backward)
    def _(dy, d_final, q, k, v, log_decay, beta, initial_state, *_):
        d_initial = q.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
        return *(t.new_empty(t.shape) for t in (q, k, v, log_decay, beta)), d_initial

    def setup_context(ctx, inputs, output) -> None:
        ctx.settings = inputs[INPUTS:]
        ctx.save_for_backward(*inputs[:INPUTS], *output[2:])
        ctx.set_materialize_grads(False)

    def gradient(ctx, dy, d_final, *_):
        saved = ctx.saved_tensors
        dy = saved[2].new_zeros(saved[2].shape) if dy is None else dy
        *gradients, d_initial = call(backward, dy, d_final, *saved, *ctx.settings)
        return *gradients, None if saved[5] is None else d_initial, None, *(None for _ in ctx.settings)

    register_autograd(forward, gradient, setup_context)


def gradients_like(found: Iterable[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients in the types of the inputs; of queries and keys, [batch, T, heads, channels], summed over heads that share them."""

    def summed(found: Tensor, like: Tensor) -> Tensor:
        return found if found.shape == like.shape else found.unflatten(2, (like.shape[2], -1)).sum(3)

    pairs = [(summed(gradient, like), like) for gradient, like in zip(found, inputs, strict=True)]
    return tuple(gradient.to(like.dtype) for gradient, like in pairs)


def heads_in_order(t: Tensor) -> Tensor:
    """[batch, T, heads, channels] whose heads and channels lie side by side."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Strides of rows, and then of tokens."""
    return [t.stride(dim) for dim in (0, 1) for t in tensors]


def ids_or(document_ids: Tensor | None, unused: Tensor) -> Tensor:
    return unused if document_ids is None else document_ids.contiguous()


def precision(t: Tensor, of_fp32: str = "ieee") -> str:
    """Precision of products of fp32: as exact as it goes for inputs of fp32."""
    return "ieee" if t.element_size() == 4 else of_fp32


def _width(block: int, channels: int) -> int:
    return min(block, max(16, 1 << (channels - 1).bit_length()))


def programs(tile: Tile, V: int) -> int:
    return -(-V // _width(tile.block_values, V))


def keys(tile: Tile, K: int) -> dict[str, int]:
    return {"BK": _width(tile.block_keys, K), "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def blocks(tile: Tile, K: int, V: int) -> dict[str, int]:
    return keys(tile, K) | {"BV": _width(tile.block_values, V)}
