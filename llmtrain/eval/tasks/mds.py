"""Samples of MDS shards in order, one shard in memory at a time. Writes nothing: the folder may be read-only."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.config.regular_file import open_regular
from llmtrain.data.shards.index import Index, ShardError, read_index, verify_shard
from llmtrain.eval.errors import EvalError

Row = tuple[str, int, dict[str, Any]]
"""(shard's file name, number of the row within it, its columns)."""


def open_mds(folder: Path) -> Index:
    """Index of a folder of shards. Raises EvalError where there is none."""
    try:
        index = read_index(folder)
    except ShardError as error:
        raise EvalError(str(error)) from None
    if index is None:
        splits = sorted(file.parent.name for file in folder.glob("*/index.json"))
        hint = f"; did you mean {folder / splits[0]}?" if splits else ""
        raise EvalError(f"{folder} holds no index.json of MDS shards{hint}")
    return index


def read_mds(folder: Path) -> Iterator[Row]:
    """All samples of a folder. Raises EvalError for shards that are missing or damaged."""
    from streaming.base.compression import decompress  # imports torch
    from streaming.base.format import reader_from_json

    index = open_mds(folder)
    for info in index.shards:
        name = info["raw_data"]["basename"]
        try:
            reader: Any = reader_from_json(str(folder), None, dict(info))
            data = _read(folder, info, decompress)
            if damage := verify_shard(io.BytesIO(data), info, index.hash_algorithm):
                raise EvalError(f"{folder / name} is damaged: {damage}")
            rows = info["samples"]
            # MDS: number of rows, then rows + 1 offsets, then their bytes.
            offsets = np.frombuffer(data, np.uint32, rows + 1, offset=4)
            for row in range(rows):
                yield name, row, reader.decode_sample(data[offsets[row] : offsets[row + 1]])
        except OSError as error:
            raise EvalError(f"{folder / name}: {error.strerror or error}") from None
        except (EvalError, ShardError):
            raise
        except Exception as error:  # decompression and decoding raise what they like
            raise EvalError(f"{folder / name} is a damaged shard: {error}") from None


def _read(folder: Path, info: dict[str, Any], decompress: Callable[[str, bytes], bytes]) -> bytes:
    """A raw shard, from its file, or from its compressed file."""
    raw, packed = info["raw_data"], info["zip_data"]
    if packed is None or (folder / raw["basename"]).exists():
        with open_regular(folder / raw["basename"]) as file:
            return file.read()
    with open_regular(folder / packed["basename"]) as file:
        return decompress(info["compression"], file.read())
