"""Kimi Delta Attention's rule in Triton: the operator, its gradient, and the order of its kernels.

The kernels are those of the gated delta rule (gated_delta/triton.py), in which each channel of the keys has a decay of its own:
chunk_decays, pair_products, chunk_transform, state_passing and chunk_outputs, and backward state_passing_bwd, pair_gradients and
chunk_gradients. chunk_decays multiplies queries and keys by their decays from the start of a chunk and to its end, once for all
kernels behind it. Kept for the backward pass are these three, the running sums of log_decay, the transforms and scores of chunks,
the errors and the states between chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.gated_delta.operators import (
    OperatorRule,
    blocks,
    differentiable,
    gradients_like,
    heads_in_order,
    ids_or,
    keys,
    precision,
    programs,
    strides,
)
from llmtrain.kernels.gated_delta.triton_launch import Tile
from llmtrain.kernels.kimi_delta import chunk_decays, chunk_gradients, chunk_outputs, chunk_transform, state_passing
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.kimi_delta.triton_launch import Launch
from llmtrain.kernels.operators import operator
from llmtrain.kernels.platform import Platform, without_wgmma


def build(spec: KimiDeltaSpec, platform: Platform, variant: str) -> TritonKimiDelta:
    return TritonKimiDelta(default_launch(spec, platform))


def default_launch(spec: KimiDeltaSpec, platform: Platform) -> Launch:
    return tuning.select("kimi_delta", spec.dtype, {"key_head_dim": spec.key_head_dim}, platform).launch


class TritonKimiDelta(OperatorRule):
    def __init__(self, launch: Launch):
        super().__init__(kimi_delta_forward, launch.chunk_size, launch.dump())


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and what is kept for the backward pass."""
    launch = Launch.parse(options)
    q, k, v = (heads_in_order(t) for t in (q, k, v))
    log_decay, beta, ids = log_decay.contiguous(), beta.contiguous(), ids_or(document_ids, beta)
    batch, T, H, V = v.shape
    K, C = k.shape[3], chunk_size
    kept = transform, scores, q_start, k_start, k_end, weights, sums, whole, states, errors = _kept(k, v, C)
    y, final = v.new_empty(v.shape), v.new_empty((batch, H, K, V), dtype=torch.float32)
    shape, chunks = {"H": H, "K": K, "C": C, "PRECISION": precision(k)}, -(-T // C)
    sizes, system = (T, chunks, chunks * C), sums.new_empty(scores.shape)
    of_tokens = {"SHARE": H // k.shape[2], "DOCUMENTS": document_ids is not None}
    with without_wgmma():
        tile = keys(launch.chunk_decays, K)
        chunk_decays.chunk_decays_kernel[(-(-K // tile["BK"]), chunks, batch * H)](
            q, k, log_decay, ids, sums, whole, q_start, k_start, k_end, T, chunks * C, *strides(q, k),
            H=H, K=K, C=C, **of_tokens, **tile,
        )  # fmt: skip
        chunk_transform.pair_products_kernel[(C // 16, chunks, batch * H)](
            q, k, sums, ids, scores, system, T, chunks * C, *strides(q, k), **shape, **of_tokens,
            **keys(launch.pair_products, K),
        )  # fmt: skip
        tile = launch.chunk_transform
        chunk_transform.chunk_transform_kernel[(chunks, batch * H)](
            system, beta, transform, weights, T, chunks * C, H=H, C=C, num_warps=tile.num_warps, num_stages=tile.num_stages,
            SOLVE_PRECISION=precision(k, launch.solve_precision),
        )  # fmt: skip
        state_passing.state_passing_kernel[(programs(launch.state_passing, V), batch * H)](
            k_start, k_end, v, transform, weights, whole, weights if initial_state is None else initial_state.contiguous(),
            states, errors, final, *sizes, *strides(v), **shape, V=V, INITIAL=initial_state is not None,
            **_all_keys(launch.state_passing, K, V),
        )  # fmt: skip
        chunk_outputs.chunk_outputs_kernel[(programs(launch.chunk_outputs, V), chunks, batch * H)](
            q_start, scores, weights, states, errors, y, *sizes, **shape, V=V, **blocks(launch.chunk_outputs, K, V),
        )  # fmt: skip
    return y, final, *kept


kimi_delta_forward = operator("kimi_delta_forward", launch_forward, replayed=True)


def _kept(k: Tensor, v: Tensor, C: int) -> tuple[Tensor, ...]:
    """Room for transforms, scores, queries and keys with their decays; for beta, running sums and decays of chunks (fp32); for
    states and errors."""
    (batch, T, H, V), K = v.shape, k.shape[3]
    chunks, wide = (T + C - 1) // C, {"dtype": torch.float32}
    squares = (k.new_empty((batch, T, H, C)) for _ in range(2))
    decayed = (k.new_empty((batch, T, H, K)) for _ in range(3))
    weights, sums = k.new_empty((batch, H, chunks * C), **wide), k.new_empty((batch, chunks * C, H, K), **wide)
    whole, states = k.new_empty((batch, chunks, H, K), **wide), k.new_empty((batch, chunks, H, K, V))
    return *squares, *decayed, weights, sums, whole, states, v.new_empty(v.shape)


def launch_backward(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, transform: Tensor, scores: Tensor, q_start: Tensor,
    k_start: Tensor, k_end: Tensor, weights: Tensor, sums: Tensor, whole: Tensor, states: Tensor, errors: Tensor,
    chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_decay, beta, and of the initial state (if there is none: empty)."""
    launch, like = Launch.parse(options), (q, k, v, log_decay, beta)
    q, k, dy = (heads_in_order(t) for t in (q, k, dy))
    batch, T, H, V = v.shape
    K, C, share = k.shape[3], chunk_size, H // k.shape[2]
    shape, chunks = {"H": H, "K": K, "V": V, "C": C, "PRECISION": precision(k)}, -(-T // C)
    sizes, ids = (T, chunks, chunks * C), ids_or(document_ids, beta)
    d_scores, d_system = torch.empty_like(scores), torch.empty_like(scores)
    parts = programs(launch.state_passing_bwd, V)
    d_states, d_written = torch.empty_like(states), torch.empty_like(errors)
    d_initial = v.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    dq, dk = (k.new_empty((batch, T, H, K)) for _ in range(2))
    dv, d_log_decay, d_beta = (
        v.new_empty(v.shape),
        sums.new_empty((batch, T, H, K)),
        sums.new_empty((parts, batch, T, H)),
    )
    tile = blocks(launch.chunk_gradients, K, V)
    with without_wgmma():
        state_passing.state_passing_bwd_kernel[(parts, batch * H)](
            q_start, k_start, k_end, transform, scores, weights, whole, errors, dy,
            weights if d_final is None else d_final.contiguous(), d_states, d_written, d_beta, d_initial,
            *sizes, batch * T * H, *strides(dy),
            **shape, FINAL=d_final is not None, INITIAL=initial_state is not None,
            **_all_keys(launch.state_passing_bwd, K, V),
        )  # fmt: skip
        pairs = blocks(launch.pair_gradients, K, V)
        del pairs["BK"]
        chunk_gradients.pair_gradients_kernel[(chunks, batch * H)](
            weights, ids, errors, d_written, dy, d_scores, d_system, dv, T, chunks * C, *strides(dy),
            H=H, V=V, C=C, PRECISION=precision(k), DOCUMENTS=document_ids is not None, **pairs,
        )  # fmt: skip
        chunk_gradients.chunk_gradients_kernel[(-(-K // tile["BK"]), chunks, batch * H)](
            q, k, sums, weights, ids, states, d_states, errors, d_written, dy, d_scores, d_system, dq, dk, d_log_decay,
            *sizes, *strides(q, k, dy), **shape, SHARE=share, DOCUMENTS=document_ids is not None, **tile,
        )  # fmt: skip
    return *gradients_like((dq, dk, dv, d_log_decay, d_beta.sum(0)), like), d_initial


kimi_delta_backward = operator("kimi_delta_backward", launch_backward, replayed=True)


differentiable(kimi_delta_forward, kimi_delta_backward, lambda k, v, _, chunk_size, *__: _kept(k, v, chunk_size))


def _all_keys(tile: Tile, K: int, V: int) -> dict[str, int]:
    """Blocks of programs that take all keys."""
    return blocks(tile, K, V) | {"BK": max(16, 1 << (K - 1).bit_length())}
