"""Writing a checkpoint's tensors one after another, by one process, in bounded memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import storage
from llmtrain.checkpoint.format.index import Index, Piece, TensorRecord
from llmtrain.checkpoint.format.manifest import FileRecord
from llmtrain.checkpoint.format.tensor_file import DTYPE_NAMES, Entry, TensorFile, split_into_files

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
    """`write_tensors` of a model's parameters, without optimizer state."""
    by_name = {f"model.{tensor.name}": tensor for tensor in tensors}

    def pieces(entry: Entry) -> Iterator[Tensor]:
        made = by_name[entry.name].make()
        assert made.shape == entry.shape, entry.name
        for piece in made.reshape(-1).split(PIECE_BYTES // entry.dtype.itemsize):
            yield piece.to(entry.dtype)

    entries = [Entry(name, torch.float32, tensor.shape) for name, tensor in by_name.items()]
    return write_tensors(folder, entries, pieces, progress, save_id)


def write_tensors(
    folder: Path,
    entries: Iterable[Entry],
    pieces: Callable[[Entry], Iterator[Tensor]],
    progress: Callable[[int], None],
    save_id: str,
    values: Mapping[str, Any] | None = None,
    file_bytes: int | None = None,
) -> dict[str, FileRecord]:
    """Write a checkpoint's files, except its manifest, into `folder`. Returns the files for the manifest, which must have the
    same save_id.

    pieces: a tensor's elements in order, as flat tensors of its dtype. progress: called with the bytes of each piece.
    values: those that are no tensors. file_bytes: of a file, at most, but that a tensor is never split; default: as a save's.
    Raises the exceptions of creating or writing a tensor.
    """
    index = Index(save_id, {}, dict(values or {}))
    files: dict[str, FileRecord] = {}
    for number, group in enumerate(split_into_files(entries, file_bytes or storage.FILE_BYTES)):
        name = f"tensors-{number:05d}.safetensors"
        with TensorFile(folder / name, group, {"format": "pt", "save_id": save_id}) as file:
            for entry in group:
                for piece in pieces(entry):
                    file.append(piece)
                    progress(piece.nbytes)
                shape = list(entry.shape)
                whole = Piece([0] * len(shape), shape, name, entry.name)
                index.tensors[entry.name] = TensorRecord(DTYPE_NAMES[entry.dtype], shape, [whole])
        files[name] = file.record
    files[indexes.NAME] = indexes.write(folder, index)
    return dict(sorted(files.items()))
