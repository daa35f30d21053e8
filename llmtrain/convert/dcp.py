"""Reading torch's distributed checkpoint format (DCP): llmtrain's format 1, and Composer's sharded checkpoints.

Its index, `.metadata`, is a pickle, which may hold any code. Here it is read by an unpickler that allows the classes of an
index alone; the tensors' own small pickles are read by torch's, with weights_only.
"""

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.format.tensor_file import Entry
from llmtrain.config.regular_file import open_regular
from llmtrain.convert.tensor_reader import PieceReader, Window
from llmtrain.models.hf.foreign_files import reason

METADATA = ".metadata"
# Classes in an index of torch 2.0 to 2.11: plain data that runs no code.
_ALLOWED_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if name not in _ALLOWED_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index holds")
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """Read the index of a folder. Raises CheckpointError for one that is damaged, or holds anything but an index."""
    try:
        with open_regular(folder / METADATA) as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} holds no {METADATA}") from None
    except Exception as error:  # unpickling raises what it likes
        raise CheckpointError(f"{folder / METADATA} cannot be read: {reason(error)}") from error
    if not isinstance(found, Metadata) or not found.storage_data:
        raise CheckpointError(f"{folder / METADATA} is no index of a distributed checkpoint")
    for place in found.storage_data.values():
        if Path(place.relative_path).name != str(place.relative_path):
            raise CheckpointError(f"{folder / METADATA} names a file outside of its folder: {place.relative_path}")
    return found


class DcpTensors(PieceReader):
    """The tensors of a DCP folder, by name.

    The index says in which file, and where in it, each piece of a tensor is. A piece is what torch.save writes: a zip
    archive, uncompressed, whose data/0 are the elements. Its checksums are compared, so that a flipped bit is found, which
    torch.load would let pass.
    """

    def __init__(self, folder: Path):
        self._index = read_metadata(folder)
        found = self._index.state_dict_metadata.items()
        tensors = [(name, kind) for name, kind in found if isinstance(kind, TensorStorageMetadata)]
        super().__init__(folder, [Entry(name, kind.properties.dtype, tuple(kind.size)) for name, kind in tensors])

    def values(self, prefix: str) -> dict[str, Any]:
        """Values that are no tensors, by name. Raises CheckpointError for a value that needs more than weights_only."""
        found = {}
        for name, kind in self._index.state_dict_metadata.items():
            if not isinstance(kind, BytesStorageMetadata) or not name.startswith(prefix):
                continue
            place: Any = self._index.storage_data[MetadataIndex(name)]
            try:
                with open_regular(self._place / place.relative_path) as raw:
                    window: Any = Window(raw, place.offset, place.length)
                    found[name] = torch.load(window, map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
                raise CheckpointError(f"{self._place}: {name} cannot be read: {reason(error)}") from error
        return found

    def _pieces(self, name: str) -> Iterator[IO[bytes]]:
        tensor: Any = self._index.state_dict_metadata[name]
        chunks = [chunk for chunk in tensor.chunks if 0 not in chunk.sizes]  # ranks that had no row have an empty one
        # FSDP shards the first dimension, so a piece is a run of elements.
        if any(tuple(chunk.sizes[1:]) != self._entries[name].shape[1:] for chunk in chunks):
            raise CheckpointError(f"{self._place}: {name} is sharded along another dimension than its first")
        for chunk in sorted(chunks, key=lambda chunk: tuple(chunk.offsets)):
            with ExitStack() as stack:
                yield self._open(name, chunk, stack)

    def _open(self, name: str, chunk: ChunkStorageMetadata, stack: ExitStack) -> IO[bytes]:
        """Open the elements of a piece, as bytes."""
        place: Any = self._index.storage_data[MetadataIndex(name, chunk.offsets)]
        raw = stack.enter_context(open_regular(self._place / place.relative_path))
        # On the meta device torch.load reads dtype, shape and strides, not the data.
        window: Any = Window(raw, place.offset, place.length)
        meta_tensor = torch.load(window, map_location="meta", weights_only=True)
        archive = stack.enter_context(zipfile.ZipFile(Window(raw, place.offset, place.length)))
        data = next(info for info in archive.infolist() if info.filename.split("/", 1)[-1] == "data/0")
        if (
            meta_tensor.dtype != self.dtype(name)
            or meta_tensor.shape != chunk.sizes
            or not _is_plain(meta_tensor, data)
        ):
            raise EOFError("not what .metadata says")
        return stack.enter_context(archive.open(data))


def _is_plain(meta_tensor: Tensor, data: zipfile.ZipInfo) -> bool:
    """Check that a file holds exactly the elements of a tensor, in order."""
    return meta_tensor.is_contiguous() and meta_tensor.storage_offset() == 0 and data.file_size == meta_tensor.nbytes
