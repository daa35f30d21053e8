"""Reading a checkpoint's tensors a few megabytes at a time, for any number of ranks that wrote it."""

import io
import os
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.format.tensor_file import Entry
from llmtrain.models.hf.foreign_files import reason


class TensorReader(ABC):
    """Named tensors of a checkpoint, read by consecutive elements. No process group is needed."""

    def __init__(self, place: Path, entries: Iterable[Entry]):
        self._place, self._entries = place, {entry.name: entry for entry in entries}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None when there is no such tensor."""
        return self._entries[name].shape if name in self._entries else None

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._entries if name.startswith(prefix)]

    @abstractmethod
    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, as flat tensors of `counts` elements each, which must sum up to all of them.

        Raises CheckpointError for a piece that is damaged.
        """


class PieceReader(TensorReader):
    """Tensors in files, of which each holds some pieces."""

    @abstractmethod
    def _pieces(self, name: str) -> Iterator[IO[bytes] | io.RawIOBase]:
        """The pieces of a tensor in order, each open until the next one is asked for: the bytes of its elements."""

    def elements(self, name: str, counts: Iterable[int]) -> Iterator[Tensor]:
        try:
            pieces = self._pieces(name)
            source: Any = io.BytesIO()
            for count in counts:
                wanted = torch.empty(count, dtype=self.dtype(name))
                view = wanted.view(torch.uint8).numpy().data
                while view:
                    got = source.readinto(view)
                    if not got:
                        source = next(pieces, None)
                        if source is None:
                            raise EOFError("too few elements")
                    view = view[got:]
                yield wanted
            # zipfile compares the checksum where the data ends.
            if source.read(1) or next(pieces, None):
                raise EOFError("too many elements")
        except CheckpointError:
            raise
        except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, EOFError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{self._place} is damaged: tensor {name}: {reason(error)}") from error


class Window(io.RawIOBase):
    """A byte range of a file, as a file. torch's own (checkpoint.utils) seeks wrongly from the end, where zipfile begins."""

    def __init__(self, file: IO[bytes], offset: int, length: int):
        self._handle, self._offset, self._length, self._at = file.fileno(), offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        got = os.preadv(self._handle, [view], self._offset + self._at)
        self._at += got
        return got
