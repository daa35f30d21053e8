"""Buffers in host memory for a copy of the state, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK_BYTES = 2**30
"""torch rounds pinned memory up to a power of two: blocks of one lose nothing, where tensors of any size lose half."""
_ALIGNMENT = 64


class Staging:
    """Buffers for the tensors of one state, allocated once and reused by every save.

    For tensors on a GPU they are pinned (page-locked): the copy runs at the speed of the bus, without page faults.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._block = torch.empty(0, dtype=torch.uint8)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the buffers of `copy`; pinning memory takes seconds that a save should not."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self._buffers[name] = self._allocate(tensor)
        self._block = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in host memory, until the next call."""
        self.prepare(tensors)
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}

    def _allocate(self, like: Tensor) -> Tensor:
        if not like.is_cuda:
            return torch.empty(like.shape, dtype=like.dtype)
        if like.nbytes > self._block.nbytes:
            self._block = torch.empty(max(_BLOCK_BYTES, like.nbytes), dtype=torch.uint8, pin_memory=True)
        buffer = self._block[: like.nbytes].view(like.dtype).view(like.shape)
        self._block = self._block[-(-like.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return buffer
