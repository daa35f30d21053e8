"""The tensors of a checkpoint of llmtrain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.checkpoint.format.tensor_file import DTYPES, Entry, TensorSource
from llmtrain.convert.tensor_reader import PieceReader, Window


class CheckpointTensors(PieceReader):
    """The tensors of a checkpoint's folder, by name.

    The bytes are not verified; call manifest.verify with `files` first.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self._index = indexes.read(folder, manifest)
        found = self._index.tensors.items()
        super().__init__(folder, [Entry(name, DTYPES[record.dtype], tuple(record.shape)) for name, record in found])

    @property
    def values(self) -> dict[str, Any]:
        """Values that are no tensors, by name."""
        return self._index.values

    def files(self, names: Iterable[str]) -> list[str]:
        """Names of the files that hold these tensors."""
        return self._index.files(dict.fromkeys(names))

    def _pieces(self, name: str) -> Iterator[Window]:
        pieces = self._index.tensors[name].pieces
        self._refuse_other_dimensions(name, [piece.sizes for piece in pieces])
        for piece in sorted(pieces, key=lambda piece: piece.offsets):
            path = self._place / piece.file
            with TensorSource(path) as source, path.open("rb", buffering=0) as file:
                source.check(piece.key, self.dtype(name), piece.sizes)
                yield Window(file, *source.place(piece.key))
