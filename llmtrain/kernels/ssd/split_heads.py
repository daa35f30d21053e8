"""Wide heads as several narrow ones: the columns of a state do not depend on one another, and share their decays.

A head of 128 columns is two of 64 with the same dt, A and D. The kernels then have registers and shared memory for chunks of 128
tokens where d_state is large too; the decays within chunks are computed once for each part.
"""

from torch import Tensor


def split(t: Tensor, parts: int) -> Tensor:
    """[batch, T, heads, head_dim] -> [batch, T, heads * parts, head_dim / parts], without a copy where heads have no gaps."""
    return t.unflatten(-1, (parts, -1)).flatten(-3, -2)


def split_state(state: Tensor | None, parts: int) -> Tensor | None:
    """[batch, heads, head_dim, d_state] -> [batch, heads * parts, head_dim / parts, d_state]."""
    return None if state is None else state.unflatten(2, (parts, -1)).flatten(1, 2)
