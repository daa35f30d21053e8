"""Writing a checkpoint's tensors one after another, by one process, in bounded memory.

torch's dcp.save takes the list of items from a SavePlanner and then, item by item, the data: here a tensor is created at
that moment and released afterwards. SavePlanner is the public interface of torch for this.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from llmtrain.checkpoint.format.manifest import FileRecord
from llmtrain.checkpoint.format.storage import ShardWriter

PIECE_BYTES = 64 * 2**20
"""Size of the pieces in which a tensor is copied."""


@dataclass(frozen=True)
class LazyTensor:
    """A parameter that `make` creates when it is written (in any floating dtype; it is stored in fp32)."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_parameters(
    folder: Path, tensors: Iterable[LazyTensor], progress: Callable[[int], None], save_id: str
) -> dict[str, FileRecord]:
    """Write a checkpoint's files, except its manifest, into `folder`, in fp32 and without optimizer state.

    progress: called with the bytes of each piece. Returns the files for the manifest, which must have the same save_id.
    Raises the exceptions of creating or writing a tensor.
    """
    writer = ShardWriter(folder, save_id, threads=1)  # one tensor in memory at a time
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=_Planner(list(tensors), progress), no_dist=True)
        except CheckpointException as error:
            # torch reports failures by rank, an interruption among them; there is one rank.
            [(cause, _)] = error.failures.values()
            raise cause from None
    return dict(sorted(writer.files.items()))


class _Planner(SavePlanner):
    """Planner that divides every tensor into blocks of rows, and creates a tensor when its first block is requested."""

    def __init__(self, tensors: list[LazyTensor], progress: Callable[[int], None]):
        self._tensors = {f"model.{tensor.name}": tensor for tensor in tensors}
        self._progress = progress
        self._current: tuple[str, Tensor] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Ignore the empty state_dict: the constructor has the tensors."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for key, tensor in self._tensors.items() for item in _items(key, tensor.shape)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        key = write_item.index.fqn
        if self._current is None or self._current[0] != key:
            self._current = None  # before the next one is made
            self._current = key, self._tensors[key].make()
        tensor = self._current[1]
        assert write_item.tensor_data is not None and tensor.shape == self._tensors[key].shape, key
        chunk = write_item.tensor_data.chunk
        if chunk.sizes:
            tensor = tensor.narrow(0, chunk.offsets[0], chunk.sizes[0])
        self._progress(tensor.numel() * torch.float32.itemsize)
        return tensor.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _items(key: str, shape: tuple[int, ...]) -> list[WriteItem]:
    rows_at_once = max(PIECE_BYTES // (math.prod(shape[1:]) * torch.float32.itemsize), 1)
    starts = range(0, shape[0], rows_at_once) if shape else [0]
    items = []
    for start in starts:
        offsets = torch.Size([start, *[0] * (len(shape) - 1)] if shape else [])
        sizes = torch.Size([min(rows_at_once, shape[0] - start), *shape[1:]] if shape else [])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, sizes),
            properties=TensorProperties(torch.float32),
            size=torch.Size(shape),
        )
        items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))
    return items
