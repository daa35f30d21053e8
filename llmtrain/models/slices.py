"""Parts of parameters: what a process holds of each one, as tensor parallelism and then FSDP2 divide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Piece(NamedTuple):
    """A run of rows (or columns) of a whole parameter, and how many ranks of a tensor-parallel group hold it."""

    begin: int
    length: int
    copies: int


@dataclass(frozen=True)
class Slices:
    """A tensor-parallel rank's part of a parameter: `pieces` of dimension `dim`, which has `whole` entries, side by side."""

    dim: int
    whole: int
    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def shape(self, local: Sequence[int]) -> torch.Size:
        """The whole parameter's shape. local: that of what the rank holds."""
        return torch.Size((*local[: self.dim], self.whole, *local[self.dim + 1 :]))


def shard_parameter(module: nn.Module, name: str, slices: Slices) -> None:
    """Keep of a parameter on the meta device what `slices` says, and remember it for `held`."""
    whole = module.get_parameter(name)
    assert whole.device.type == "meta" and whole.shape[slices.dim] == slices.whole, (name, whole.shape, slices)
    shape = list(whole.shape)
    shape[slices.dim] = slices.length
    setattr(module, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))
    module.__dict__.setdefault("_slices", {})[name] = slices


def shards_of(module: nn.Module) -> dict[str, Slices]:
    """This rank's part of each of the module's own parameters that tensor-parallel ranks divide."""
    return module.__dict__.get("_slices", {})


class Box(NamedTuple):
    """A box of a whole parameter that this process holds.

    begin: its first corner there. at: where it is in `local_of` what was asked about. copies: tensor-parallel ranks that hold it.
    """

    begin: tuple[int, ...]
    at: tuple[slice, ...]
    copies: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(one.stop - one.start for one in self.at)


def local_of(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, or the tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, Tensor)
    return local.detach()


def boxes(tensor: Tensor, slices: Slices | None = None, copies: int = 1) -> list[Box]:
    """All that this process holds of a parameter or of something like it (a gradient, a moment).

    tensor: a plain tensor, or a DTensor that FSDP2 has sharded by rows. slices: what the tensor-parallel rank holds, of which
    `tensor` is the whole; None: everything, in `copies`.
    """
    first, shape = (0,) * tensor.ndim, tuple(local_of(tensor).shape)
    if isinstance(tensor, DTensor):
        _, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not all(shape):
        return []
    every = tuple(slice(0, n) for n in shape)
    if slices is None:
        return [Box(tuple(first), every, copies)]
    found, at, dim = [], 0, slices.dim
    for piece in slices.pieces:  # at: its place in `tensor`
        begin, end = max(at, first[dim]), min(at + piece.length, first[dim] + shape[dim])
        if begin < end:
            corner = (*first[:dim], piece.begin + begin - at, *first[dim + 1 :])
            rows = slice(begin - first[dim], end - first[dim])
            found.append(Box(corner, (*every[:dim], rows, *every[dim + 1 :]), piece.copies))
        at += piece.length
    return found
