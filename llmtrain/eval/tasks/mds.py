"""Samples of MDS shards in order, one shard in memory at a time. Writes nothing: the folder may be read-only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.data.shards import Index, ShardError, read_index
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

    for info in open_mds(folder).shards:
        name = info["raw_data"]["basename"]
        try:
            reader: Any = reader_from_json(str(folder), None, dict(info))
            raw = folder / name
            if raw.exists() or not info.get("zip_data"):
                data = raw.read_bytes()
            else:
                data = decompress(info["compression"], (folder / info["zip_data"]["basename"]).read_bytes())
            rows = int(np.frombuffer(data[:4], np.uint32)[0])
            # MDS: number of rows, then rows + 1 offsets, then their bytes.
            offsets = np.frombuffer(data, np.uint32, rows + 1, offset=4)
            for row in range(rows):
                yield name, row, reader.decode_sample(data[offsets[row] : offsets[row + 1]])
        except OSError as error:
            raise EvalError(f"{folder / name}: {error.strerror or error}") from None
        except (ValueError, IndexError, KeyError) as error:
            if isinstance(error, EvalError):
                raise
            raise EvalError(f"{folder / name} is a damaged shard: {error}") from None
