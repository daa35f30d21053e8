"""A tensor of which this process holds some boxes, as torch's distributed checkpoint (DCP) saves and loads it."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from llmtrain.models.slices import Slices, boxes, local_of


class DividedTensor:
    """A tensor-parallel rank's part of a tensor, sharded by FSDP2 or not; to DCP the boxes of the whole one that are here.

    tensor: what the rank holds, a DTensor or a plain tensor, which is loaded in place.
    """

    def __init__(self, tensor: Tensor, slices: Slices):
        self.tensor, self.slices, self.shape = tensor, slices, slices.shape(tensor.shape)
        self._boxes = {box.begin: box for box in boxes(tensor, slices)}

    def size(self) -> torch.Size:
        return self.shape

    @property
    def local(self) -> Tensor:
        """This process's elements, not copied."""
        return local_of(self.tensor)

    def part(self, index: MetadataIndex, local: Tensor) -> Tensor:
        """The elements of one box. local: `self.local`, or a copy of it."""
        assert index.offset is not None
        return local[self._boxes[tuple(index.offset)].at]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(begin), torch.Size(box.sizes)) for begin, box in self._boxes.items()]
