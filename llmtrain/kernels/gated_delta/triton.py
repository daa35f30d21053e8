"""The gated delta rule in Triton: the operator, its gradient, and the order of its kernels.

Forward: chunk_transform (all chunks in parallel), state_passing (one chunk after another), chunk_outputs (in parallel). Backward:
state_passing_bwd (in reverse), chunk_gradients (in parallel). The transforms of chunks, the scores q @ k^T of their tokens, the
errors that tokens correct and the states between chunks are kept for the backward pass. No atomics: every sum has a fixed order.

Matrix products are in the dtype of q, k and v; decays, the triangular systems and the state that is passed on are fp32.

On Hopper they are compiled with mma.sync in place of wgmma, by which Triton 3.6 gives wrong gradients here, or reads where it must
not, as it does with fla-core's kernels (its issues 640 and 984).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from llmtrain.kernels.gated_delta import chunk_outputs, chunk_transform, state_passing
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
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.triton_launch import Launch, Tile
from llmtrain.kernels.operators import operator
from llmtrain.kernels.platform import Platform, without_wgmma


def launch_for(spec: GatedDeltaSpec, platform: Platform) -> Launch:
    """Tiles for the platform: for 128 and 256 channels on Hopper the fastest of twelve sets, measured on an H200 (BENCHMARKS.md);
    else such as compile without spills at up to 256 channels of keys, and fit every GPU's shared memory."""
    wide, nvidia = spec.key_head_dim > 128, platform.vendor == "nvidia"
    if platform.arch == "sm90" and spec.key_head_dim % 128 == 0 and spec.value_head_dim % 128 == 0:
        return Launch(
            chunk_transform=Tile(32, 32, 1, 4),
            state_passing=Tile(128, 32, 4, 2 if wide else 3),
            chunk_outputs=Tile(32, 128, 4, 4),
            state_passing_bwd=Tile(128, 32, 4, 1) if wide else Tile(64, 32, 4, 2),
            chunk_gradients=Tile(64, 16, 4, 3),
            solve_precision="tf32x3",
        )
    stages = 2 if nvidia else 1
    passing = Tile(64, 16, 8 if wide else 4, stages)
    return Launch(
        chunk_transform=Tile(16, 16, 1, 1) if nvidia else Tile(32, 32, 1, 1),
        state_passing=passing,
        chunk_outputs=Tile(64, 64, 4, stages),
        state_passing_bwd=passing,
        chunk_gradients=Tile(128, 32, 8, stages) if spec.key_head_dim > 64 else Tile(32, 32, 4, stages),
        solve_precision="tf32x3" if nvidia else "ieee",
    )


def build(spec: GatedDeltaSpec, platform: Platform, variant: str) -> TritonGatedDelta:
    return TritonGatedDelta(launch_for(spec, platform))


class TritonGatedDelta(OperatorRule):
    def __init__(self, launch: Launch):
        super().__init__(gated_delta_forward, launch.chunk_size, launch.dump())


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and for the backward pass transforms, decays, states, errors and scores."""
    launch = Launch.parse(options)
    q, k, v = (heads_in_order(t) for t in (q, k, v))
    log_decay, beta, ids = log_decay.contiguous(), beta.contiguous(), ids_or(document_ids, log_decay)
    batch, T, H, V = v.shape
    K, C = k.shape[3], chunk_size
    transform, decays, states, errors, scores = _kept(k, v, C)
    y, final = v.new_empty(v.shape), v.new_empty((batch, H, K, V), dtype=torch.float32)
    shape = {"H": H, "SHARE": H // k.shape[2], "K": K, "C": C, "PRECISION": precision(k)}
    of_documents = {"DOCUMENTS": document_ids is not None}
    chunks = triton.cdiv(T, C)
    sizes = (T, chunks, chunks * C, batch * H * chunks * C)
    with without_wgmma():
        chunk_transform.chunk_transform_kernel[(chunks, batch * H)](
            k, log_decay, beta, ids, transform, decays, T, *sizes[2:], *strides(k), **shape, **of_documents,
            SOLVE_PRECISION=precision(k, launch.solve_precision), **keys(launch.chunk_transform, K),
        )  # fmt: skip
        state_passing.state_passing_kernel[(programs(launch.state_passing, V), batch * H)](
            k, v, transform, decays, decays if initial_state is None else initial_state.contiguous(), states, errors, final,
            *sizes, *strides(k, v), **shape, V=V, INITIAL=initial_state is not None, **_all_keys(launch.state_passing, K, V),
        )  # fmt: skip
        chunk_outputs.chunk_outputs_kernel[(programs(launch.chunk_outputs, V), chunks, batch * H)](
            q, k, decays, ids, states, errors, y, scores, *sizes, *strides(q, k), **shape, V=V, **of_documents,
            **blocks(launch.chunk_outputs, K, V),
        )  # fmt: skip
    return y, final, transform, decays, states, errors, scores


gated_delta_forward = operator("gated_delta_forward", launch_forward, replayed=True)


def _kept(k: Tensor, v: Tensor, C: int) -> tuple[Tensor, ...]:
    """Room for transforms, decays (fp32), states, errors and scores."""
    batch, T, H, V = v.shape
    chunks = (T + C - 1) // C
    transform, scores = (k.new_empty((batch, T, H, C)) for _ in range(2))
    decays = k.new_empty((4, batch, H, chunks * C), dtype=torch.float32)
    return transform, decays, k.new_empty((batch, chunks, H, k.shape[3], V)), v.new_empty(v.shape), scores


def launch_backward(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, transform: Tensor, decays: Tensor, states: Tensor,
    errors: Tensor, scores: Tensor, chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_decay, beta, and of the initial state (if there is none: empty)."""
    launch, like = Launch.parse(options), (q, k, v, log_decay, beta)
    q, k, dy = (heads_in_order(t) for t in (q, k, dy))
    ids = ids_or(document_ids, decays)
    batch, T, H, V = v.shape
    K, C, share = k.shape[3], chunk_size, H // k.shape[2]
    shape = {"H": H, "SHARE": share, "K": K, "V": V, "C": C, "PRECISION": precision(k)}
    chunks = triton.cdiv(T, C)
    sizes = (T, chunks, chunks * C, batch * H * chunks * C)
    steps = strides(q, k, dy)

    d_states, d_written = torch.empty_like(states), torch.empty_like(errors)
    d_initial = v.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    dq, dk = (k.new_empty((batch, T, H, K)) for _ in range(2))
    dv = v.new_empty(v.shape)
    tile = blocks(launch.chunk_gradients, K, V)
    parts = triton.cdiv(K, tile["BK"])
    d_log_decay, d_beta = decays.new_empty((parts, batch, T, H)), decays.new_empty((batch, T, H))
    with without_wgmma():
        state_passing.state_passing_bwd_kernel[(programs(launch.state_passing_bwd, V), batch * H)](
            q, k, transform, scores, decays, dy, decays if d_final is None else d_final.contiguous(), d_states, d_written,
            d_initial, *sizes, *steps, **shape, FINAL=d_final is not None, INITIAL=initial_state is not None,
            **_all_keys(launch.state_passing_bwd, K, V),
        )  # fmt: skip
        chunk_outputs.chunk_gradients_kernel[(parts, chunks, batch * H)](
            q, k, decays, ids, states, d_states, errors, d_written, dy, dq, dk, dv, d_log_decay, d_beta,
            *sizes, batch * T * H, *steps, **shape, DOCUMENTS=document_ids is not None, **tile,
        )  # fmt: skip
    d_log_decay = d_log_decay.sum(0) if parts > 1 else d_log_decay[0]
    return *gradients_like((dq, dk, dv, d_log_decay, d_beta), like), d_initial


gated_delta_backward = operator("gated_delta_backward", launch_backward, replayed=True)


differentiable(gated_delta_forward, gated_delta_backward, lambda k, v, _, chunk_size, *__: _kept(k, v, chunk_size))


def _all_keys(tile: Tile, K: int, V: int) -> dict[str, int]:
    """Blocks of programs that take all keys, in two halves if they are more than a block."""
    sizes = blocks(tile, K, V)
    return sizes | {"BK": max(sizes["BK"], triton.next_power_of_2(K) // 2)}
