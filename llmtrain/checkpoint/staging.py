"""Host memory for the state of a run: for a copy of it, so that training may go on while that is written, and pinned blocks."""

from collections.abc import Mapping

import torch
from torch import Tensor

_BLOCK_BYTES = 2**30
"""torch rounds pinned memory up to a power of two: blocks of one lose nothing, where tensors of any size lose half."""
_ALIGNMENT = 64


class PinnedBlocks:
    """Allocates host memory, many tensors to a block. For tensors on a GPU it is pinned (page-locked): copies run at the speed of
    the bus, without page faults."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def empty_like(self, like: Tensor) -> Tensor:
        """Contiguous host memory for a copy of a tensor, with no values yet."""
        if not like.is_cuda:
            return torch.empty(like.shape, dtype=like.dtype)
        if like.nbytes > self._block.nbytes:
            self._block = torch.empty(max(_BLOCK_BYTES, like.nbytes), dtype=torch.uint8, pin_memory=True)
        buffer = self._block[: like.nbytes].view(like.dtype).view(like.shape)
        self._block = self._block[-(-like.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return buffer

    def release(self) -> None:
        """Leave the rest of the last block to its tensors."""
        self._block = torch.empty(0, dtype=torch.uint8)


class Staging:
    """Buffers for the tensors of one state, allocated once and reused by every save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._blocks = PinnedBlocks()

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the buffers of `copy`; pinning memory takes seconds that a save should not."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                self._buffers[name] = self._blocks.empty_like(tensor)
        self._blocks.release()

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in host memory, until the next call."""
        self.prepare(tensors)
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return {name: self._buffers[name] for name in tensors}
