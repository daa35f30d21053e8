"""Writing and reading safetensors files piece by piece, hashed on the way to the disk.

The library's save_file wants all tensors of a file at once, in memory; here only a piece of one is. The format:
see checkpoint/format/header.py.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor

from llmtrain.checkpoint.format.header import Header, read_header
from llmtrain.checkpoint.format.manifest import FileRecord
from llmtrain.config.regular_file import open_regular
from llmtrain.errors import UserError
from llmtrain.models.hf.hf_checkpoint import DTYPES

Item = TypeVar("Item")

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
_SLICE_BYTES = 4 * 2**20
"""Written and hashed at a time: small enough to be in the cache for both."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def split_into_files(
    items: Iterable[Item], max_bytes: int, entry_of: Callable[[Any], Entry] = lambda item: item
) -> list[list[Item]]:
    """Divide tensors, in order, into files of at most max_bytes; a larger tensor has a file of its own. entry_of: of an item."""
    files: list[list[Item]] = []
    size = 0
    for item in items:
        nbytes = entry_of(item).nbytes
        if not files or size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(item)
        size += nbytes
    return files


class TensorFile:
    """A file whose tensors are known by name and arrive in the order of `entries`, each in any number of flat pieces.

    Use it as a context manager; leaving it flushes the file to the disk, and `record` is then final.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]):
        assert sys.byteorder == "little", "safetensors are little-endian, and so are the bytes written here"
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for entry in entries:
            begin, end = end, end + entry.nbytes
            assert entry.name not in header, entry.name
            shape = list(entry.shape)
            header[entry.name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._missing, self._bytes, self._hash = end, 0, xxhash.xxh3_128()
        self._file = path.open("wb")
        self._write(memoryview(len(text).to_bytes(8, "little") + text))

    def append(self, piece: Tensor) -> None:
        """Write the next elements. piece: in the memory of the CPU, of the dtype of the tensor they belong to."""
        self._missing -= piece.nbytes
        self._write(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    @property
    def record(self) -> FileRecord:
        return {"bytes": self._bytes, "xxh3_128": self._hash.hexdigest()}

    def _write(self, content: memoryview) -> None:
        for start in range(0, len(content), _SLICE_BYTES):
            part = content[start : start + _SLICE_BYTES]
            self._file.write(part)
            self._hash.update(part)
        self._bytes += len(content)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            if kind is None:
                assert self._missing == 0, f"{self._missing} bytes are missing"
                file.flush()
                os.fsync(file.fileno())


class TensorSource:
    """A safetensors file to read any run of a tensor's elements from. Use it as a context manager."""

    def __init__(self, path: Path):
        self._path = path
        self._header: Header = read_header(path)
        self._file = open_regular(path)

    def check(self, key: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise UserError unless the file has this tensor, whole."""
        found = self._header.tensors.get(key)
        if found is None:
            raise UserError(f"{self._path.name} holds no tensor {key}")
        begin, end = found["data_offsets"]
        if (
            found["dtype"] != DTYPE_NAMES[dtype]
            or list(found["shape"]) != list(shape)
            or end - begin != math.prod(shape) * dtype.itemsize
        ):
            raise UserError(f"{self._path.name}: {key} is not of the dtype and shape that the index says")

    def place(self, key: str) -> tuple[int, int]:
        """(offset in the file, length) of a tensor's bytes."""
        begin, end = self._header.tensors[key]["data_offsets"]
        return self._header.data + begin, end - begin

    def read_into(self, key: str, first: int, wanted: Tensor) -> None:
        """Fill `wanted` (contiguous, on the CPU) with the tensor's elements from `first` on. Raises EOFError at the end."""
        view = wanted.reshape(-1).view(torch.uint8).numpy().data
        at = self.place(key)[0] + first * wanted.element_size()
        while view:
            got = os.preadv(self._file.fileno(), [view], at)
            if not got:
                raise EOFError(f"{self._path.name} ends within {key}")
            view, at = view[got:], at + got

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
