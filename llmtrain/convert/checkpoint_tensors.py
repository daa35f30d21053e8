"""The tensors of a checkpoint of llmtrain."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.index import Piece
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.format.tensor_file import DTYPES, Entry, TensorSource
from llmtrain.convert.tensor_reader import PieceReader, Window

_BAND_BYTES = 16 * 2**20
"""Bytes of a divided matrix that are put together at a time."""


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

    def _pieces(self, name: str) -> Iterator[Window | io.BytesIO]:
        record = self._index.tensors[name]
        pieces = sorted(record.pieces, key=lambda piece: piece.offsets)
        if any(piece.sizes[1:] != record.shape[1:] for piece in pieces):
            yield from self._bands(name, pieces)
            return
        for piece in pieces:
            path = self._place / piece.file
            with TensorSource(path) as source, path.open("rb", buffering=0) as file:
                source.check(piece.key, self.dtype(name), piece.sizes)
                yield Window(file, *source.place(piece.key))

    def _bands(self, name: str, pieces: Sequence[Piece]) -> Iterator[io.BytesIO]:
        """A matrix whose columns were divided between ranks, some rows at a time. pieces: in order."""
        shape, dtype = self._index.tensors[name].shape, self.dtype(name)
        if len(shape) != 2:
            raise CheckpointError(f"{self._place}: {name} is sharded along another dimension than its first")
        at_once = max(_BAND_BYTES // (shape[1] * dtype.itemsize), 1)
        cuts = {row for piece in pieces for row in (piece.offsets[0], piece.offsets[0] + piece.sizes[0])}
        for begin, end in pairwise(sorted(cuts)):
            beside = [p for p in pieces if p.offsets[0] <= begin and end <= p.offsets[0] + p.sizes[0]]
            with ExitStack() as stack:
                sources = [stack.enter_context(TensorSource(self._place / piece.file)) for piece in beside]
                for source, piece in zip(sources, beside, strict=True):
                    source.check(piece.key, dtype, piece.sizes)
                for start in range(begin, end, at_once):
                    parts = []
                    for source, piece in zip(sources, beside, strict=True):
                        part = torch.empty(min(at_once, end - start), piece.sizes[1], dtype=dtype)
                        source.read_into(piece.key, (start - piece.offsets[0]) * piece.sizes[1], part)
                        parts.append(part)
                    yield io.BytesIO(torch.cat(parts, dim=1).view(torch.uint8).numpy().tobytes())
