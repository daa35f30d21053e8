"""The tensors of a checkpoint of llmtrain."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.beneath import Layer, open_stack
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.index import Piece, TensorRecord
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.format.tensor_file import DTYPES, Entry, TensorSource
from llmtrain.config.regular_file import open_regular
from llmtrain.convert.tensor_reader import PieceReader, Window

_BAND_BYTES = 16 * 2**20
"""Bytes of a divided matrix that are put together at a time."""


class CheckpointTensors(PieceReader):
    """The tensors of a checkpoint's folder, and the parameters of those beneath it, by name. `verify` alone compares bytes."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.stack = open_stack(folder, manifest)
        self._records: dict[str, tuple[Layer, TensorRecord]] = {}
        for layer in reversed(self.stack):
            found = layer.index.tensors.items()
            self._records |= {
                name: (layer, record) for name, record in found if layer is self.stack[0] or name.startswith("model.")
            }
        entries = [
            Entry(name, DTYPES[record.dtype], tuple(record.shape)) for name, (_, record) in self._records.items()
        ]
        super().__init__(folder, entries)

    @property
    def values(self) -> dict[str, Any]:
        """Values that are no tensors, by name."""
        return self.stack[0].index.values

    def verify(self, names: Iterable[str]) -> None:
        """Compare the hashes of the files that hold these tensors. Raises CheckpointError."""
        names = list(names)
        for layer in self.stack:
            here = {name: None for name in names if self._records[name][0] is layer}
            manifests.verify(layer.folder, layer.manifest, names=layer.index.files(here))

    def _pieces(self, name: str) -> Iterator[Window | io.BytesIO]:
        layer, record = self._records[name]
        pieces = sorted(record.pieces, key=lambda piece: piece.offsets)
        if any(piece.sizes[1:] != record.shape[1:] for piece in pieces):
            yield from self._bands(name, layer.folder, pieces)
            return
        for piece in pieces:
            path = layer.folder / piece.file
            with TensorSource(path) as source, open_regular(path) as file:
                source.check(piece.key, self.dtype(name), piece.sizes)
                yield Window(file, *source.place(piece.key))

    def _bands(self, name: str, folder: Path, pieces: Sequence[Piece]) -> Iterator[io.BytesIO]:
        """A matrix whose columns were divided between ranks, some rows at a time. pieces: in order."""
        shape, dtype = self.shape(name) or (), self.dtype(name)
        if len(shape) != 2:
            raise CheckpointError(f"{folder}: {name} is sharded along another dimension than its first")
        at_once = max(_BAND_BYTES // (shape[1] * dtype.itemsize), 1)
        cuts = {row for piece in pieces for row in (piece.offsets[0], piece.offsets[0] + piece.sizes[0])}
        for begin, end in pairwise(sorted(cuts)):
            beside = [p for p in pieces if p.offsets[0] <= begin and end <= p.offsets[0] + p.sizes[0]]
            with ExitStack() as stack:
                sources = [stack.enter_context(TensorSource(folder / piece.file)) for piece in beside]
                for source, piece in zip(sources, beside, strict=True):
                    source.check(piece.key, dtype, piece.sizes)
                for start in range(begin, end, at_once):
                    parts = []
                    for source, piece in zip(sources, beside, strict=True):
                        part = torch.empty(min(at_once, end - start), piece.sizes[1], dtype=dtype)
                        source.read_into(piece.key, (start - piece.offsets[0]) * piece.sizes[1], part)
                        parts.append(part)
                    yield io.BytesIO(torch.cat(parts, dim=1).view(torch.uint8).numpy().tobytes())
