"""Convolution over a prefix tree (kernels/attention/prefix_tree.py): the tokens in each token's window."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def predecessors(lengths: Sequence[int], ancestors: Sequence[Sequence[int]], reach: int) -> Tensor:
    """[T, reach] in int32, on the CPU: the token 1, 2, ... positions before each in its own request, -1 before the request begins.

    lengths: tokens of each segment, in order, at least one; ancestors: the earlier segments that it continues, the outermost first.
    """
    size = np.array(lengths, dtype=np.int64)
    end = size.cumsum()
    parent = np.array([chain[-1] if chain else -1 for chain in ancestors])
    depth = np.array([len(chain) for chain in ancestors])
    back = np.arange(1, reach + 1)
    # The last tokens of each segment, from its end back through its ancestors; the last row, for roots: none.
    last = np.full((len(size) + 1, reach), -1)
    for level in range(depth.max() + 1):
        (some,) = np.nonzero(depth == level)
        beyond = np.maximum(back - size[some, None] - 1, 0)
        last[some] = np.where(back <= size[some, None], end[some, None] - back, last[parent[some][:, None], beyond])
    segment = np.repeat(np.arange(len(size)), size)
    token = np.arange(end[-1])
    inside = (token - (end - size)[segment])[:, None]
    beyond = np.maximum(back - inside - 1, 0)
    found = np.where(back <= inside, token[:, None] - back, last[parent[segment][:, None], beyond])
    return torch.from_numpy(found.astype(np.int32))
