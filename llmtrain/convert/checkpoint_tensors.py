"""Reading a checkpoint's tensors a few megabytes at a time, for any number of ranks that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.header import HeaderError
from llmtrain.checkpoint.format.index import Piece, TensorRecord
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.format.tensor_file import DTYPES, TensorSource


class CheckpointTensors:
    """The tensors of a checkpoint's folder, by name. No process group is needed.

    The bytes are not verified; call manifest.verify with `files` first.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder = folder
        self._index = indexes.read(folder, manifest)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None when there is no such tensor."""
        found = self._index.tensors.get(name)
        return tuple(found.shape) if found is not None else None

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._index.tensors[name].dtype]

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._index.tensors if name.startswith(prefix)]

    @property
    def values(self) -> dict[str, Any]:
        """Values that are no tensors, by name."""
        return self._index.values

    def files(self, names: Iterable[str]) -> list[str]:
        """Names of the files that hold these tensors."""
        return self._index.files(dict.fromkeys(names))

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as flat tensors of `counts` elements each, which must sum up to all of them.

        Raises CheckpointError for a file that is damaged.
        """
        record, dtype = self._index.tensors[name], self.dtype(name)
        pieces = iter(_in_order(self._folder, name, record))
        try:
            with ExitStack() as opened:
                piece, source, at, end = None, None, 0, 0
                for count in counts:
                    wanted = torch.empty(count, dtype=dtype)
                    filled = 0
                    while filled < count:
                        if at == end:
                            piece = next(pieces, None)
                            if piece is None:
                                raise EOFError("too few elements")
                            opened.close()
                            source = opened.enter_context(TensorSource(self._folder / piece.file))
                            source.check(piece.key, dtype, piece.sizes)
                            at, end = 0, torch.Size(piece.sizes).numel()
                        assert piece is not None and source is not None
                        size = min(count - filled, end - at)
                        source.read_into(piece.key, at, wanted[filled : filled + size])
                        at, filled = at + size, filled + size
                    yield wanted
                if at != end or next(pieces, None):
                    raise EOFError("too many elements")
        except CheckpointError:
            raise
        except (HeaderError, ValueError, EOFError, OSError) as error:
            raise CheckpointError(f"{self._folder} is damaged: tensor {name}: {error}") from error


def _in_order(folder: Path, name: str, record: TensorRecord) -> list[Piece]:
    # FSDP2 shards the first dimension, so a piece is a run of elements.
    if any(piece.sizes[1:] != record.shape[1:] for piece in record.pieces):
        raise CheckpointError(f"{folder}: {name} is sharded along another dimension than its first")
    return sorted(record.pieces, key=lambda piece: piece.offsets)
