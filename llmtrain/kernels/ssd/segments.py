"""Terms that a segment adds to the state of a sequence that several ranks scan, and to the gradient of the state before it.

A segment scanned from a state of zero ends in `added`; from the state h it ends in added + decay h. In the backward the gradient of
the state before it is likewise own + decay d, with d that of the state after it. So few numbers per segment, exchanged, give
every rank the states and gradients at its segments' borders; then the scan of triton.py runs as if the sequence were its own.
"""

from torch import Tensor

from llmtrain.kernels.ssd import split_heads, state_passing
from llmtrain.kernels.ssd.chunk_cumsum import chunk_cumsum_fwd
from llmtrain.kernels.ssd.triton_launch import Launch

Limits = tuple[float | None, float | None]


def added_state(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor, document_ids: Tensor | None, limits: Limits, launch: Launch
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state after each row from a state of zero, [batch, heads, head_dim, d_state], and log2 of the decay of a whole row
    without document starts, [batch, heads]; both fp32. Arguments as of the scan; document_ids: int32, contiguous.
    """
    dA_cumsum, state = _pass(x, dt, A, B, dt_bias, document_ids, limits, launch, reverse=False)
    return state, dA_cumsum[:, :: launch.head_parts(x.shape[3]), :, 0, -1].sum(2)


def initial_gradient(
    dy: Tensor, dt: Tensor, A: Tensor, C: Tensor, dt_bias: Tensor, document_ids: Tensor | None, limits: Limits, launch: Launch
) -> Tensor:  # fmt: skip
    """The gradient of the state before each row where that of the state after it is zero, like added_state's."""
    return _pass(dy, dt, A, C, dt_bias, document_ids, limits, launch, reverse=True)[1]


def _pass(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, dt_bias: Tensor, document_ids: Tensor | None, limits: Limits, launch: Launch,
    reverse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cumulative log-decays of the parts of the heads, and the state."""
    shape, parts = x.shape, launch.head_parts(x.shape[3])
    if parts > 1:
        x = split_heads.split(x, parts)
    dA_cumsum, _, seq_idx = chunk_cumsum_fwd(dt, A, dt_bias, document_ids, limits, launch.chunk_size, False, parts)
    passing = (launch.chunk_size, launch.input_precision, launch.state_passing)
    state = state_passing.added_state(x, B, dA_cumsum, seq_idx, *passing, reverse)
    return dA_cumsum, state.view(shape[0], *shape[2:], B.shape[3])
