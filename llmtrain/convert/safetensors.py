"""Writing safetensors files piece by piece.

The library's save_file wants all tensors of a file at once, in memory; here only a piece of one is. The format
(https://github.com/huggingface/safetensors#format): the length of the header as a little-endian u64, the header as
JSON, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
_ALIGNMENT = 8


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


class TensorFile:
    """A file whose tensors are known by name and arrive in the order of `entries`, each in any number of flat pieces.

    Use it as a context manager; leaving it flushes the file to the disk.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]):
        assert sys.byteorder == "little", "safetensors are little-endian, and so are the bytes written here"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for the format
        end = 0
        for entry in entries:
            begin, end = end, end + entry.nbytes
            shape = list(entry.shape)
            header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._missing = end
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, piece: Tensor) -> None:
        """piece: the next elements, of the dtype of the tensor they belong to."""
        self._missing -= piece.nbytes
        self._file.write(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file as file:
            if kind is None:
                assert self._missing == 0, f"{self._missing} bytes are missing"
                file.flush()
                os.fsync(file.fileno())


def divide(entries: Iterable[Entry], max_bytes: int) -> list[list[Entry]]:
    """Files of at most max_bytes of tensors each, in order; a tensor that is larger has a file of its own."""
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def file_names(count: int) -> list[str]:
    """As transformers names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
