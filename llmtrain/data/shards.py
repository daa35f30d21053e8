"""The index.json of MDS shards, read without torch: checks before a run, sizes, fingerprints."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.errors import UserError
from llmtrain.schema.data import DataConfig, StreamConfig

TOKEN_COLUMNS = ("tokens", "input_ids")
"""Columns that may hold token ids; llmtrain and LLM Foundry write the first."""


class ShardError(UserError):
    """Shards that are missing, damaged, or do not fit the config."""


@dataclass(frozen=True)
class Index:
    """One stream's index.json."""

    folder: Path
    shards: list[dict[str, Any]]

    @property
    def samples(self) -> int:
        return sum(shard["samples"] for shard in self.shards)

    @property
    def hash_algorithm(self) -> str | None:
        """A hash algorithm that all shards have in common, or None."""
        common = set.intersection(*(set(shard["hashes"]) for shard in self.shards)) if self.shards else set()
        return min(common, default=None)

    def seq_lens(self) -> set[int | None]:
        """Tokens per sample by the columns' encodings; None for columns with a length per sample."""
        return {_seq_len(shard) for shard in self.shards}

    def has_tokens(self) -> bool:
        return all(any(name in shard.get("column_names", []) for name in TOKEN_COLUMNS) for shard in self.shards)


def _seq_len(shard: dict[str, Any]) -> int | None:
    encodings = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    encoding = next((encodings[name] for name in TOKEN_COLUMNS if name in encodings), "")
    parts = encoding.split(":")
    return int(parts[2]) if parts[0] == "ndarray" and len(parts) == 3 and parts[2].isdigit() else None


def stream_folder(stream: StreamConfig) -> Path:
    return Path(stream.local).expanduser() / (stream.split or "")


def read_index(folder: Path) -> Index | None:
    """Read a folder's index.json; None if there is none. Raises ShardError for one that is not an index."""
    file = folder / "index.json"
    try:
        shards = json.loads(file.read_text(encoding="utf-8"))["shards"]
        index = Index(folder, shards)
        _ = index.samples, index.hash_algorithm
        return index
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShardError(f"{file} is not the index of MDS shards: {error!r}") from error


def epoch_samples(samples: int, global_batch_size: int, num_canonical_nodes: int) -> int:
    """Samples of one epoch: the largest number of whole global batches that the canonical nodes share evenly.

    StreamingDataset repeats samples to fill a remainder, differently for each number of ranks; without a remainder the
    order is the same on any number. The samples left out, fewer than lcm(batch, nodes), differ between epochs when
    shuffling.
    """
    return samples // (step := math.lcm(global_batch_size, num_canonical_nodes)) * step


def check_streams(data: DataConfig, global_batch_size: int) -> list[Problem]:
    """Problems of the shards on the local disk; paths begin with `data.`.

    A remote stream without a cached index is not checked, nor is data.prepare before it has run.
    """
    problems: list[Problem] = []
    for split, streams in (("train", data.train_streams()), ("validation", data.validation_streams())):
        explicit = getattr(data, split) is not None
        indexes: list[Index] = []
        for name, stream in streams.items():
            path = f"data.{split}.streams.{name}" if explicit else "data.prepare"
            index, found = _check_stream(stream, path, data.seq_len, explicit)
            problems += found
            if index:
                indexes.append(index)
        problems += _check_duplicate_folders(streams, split)
        if split == "train" and streams and len(indexes) == len(streams):
            problems += _check_size(sum(index.samples for index in indexes), data, global_batch_size)
    return problems


def check_vocabulary(data: DataConfig, vocab_size: int) -> list[Problem]:
    """Problems with model.vocab_size: smaller than the tokenizer in the manifest of `llmtrain prepare`."""
    problems = []
    folders = {stream.local for stream in [*data.train_streams().values(), *data.validation_streams().values()]}
    for folder in sorted(folders):
        try:
            manifest = json.loads((Path(folder).expanduser() / "manifest.json").read_text(encoding="utf-8"))
            size = int(manifest["tokenizer"]["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not of `llmtrain prepare`, or remote: samples are checked during training
        if size > vocab_size:
            message = f"the tokenizer of {folder} has {size} tokens; set model.vocab_size to {size} or more"
            problems.append(Problem("model.vocab_size", vocab_size, message))
    return problems


def _check_stream(stream: StreamConfig, path: str, seq_len: int, explicit: bool) -> tuple[Index | None, list[Problem]]:
    folder = stream_folder(stream)
    local = f"{path}.local" if explicit else f"{path}.out"
    try:
        index = read_index(folder)
    except ShardError as error:
        return None, [Problem(local, stream.local, str(error))]
    if index is None:
        return None, [] if stream.remote or (not explicit and not folder.exists()) else [
            Problem(local, stream.local, _advice(folder))
        ]
    return index, list(_check_index(index, local, stream, seq_len))


def _advice(folder: Path) -> str:
    state = "holds no index.json of MDS shards" if folder.is_dir() else "does not exist"
    return f"{folder} {state}; make it with `llmtrain prepare SOURCE... --out {folder.parent}`, or give remote"


def _check_index(index: Index, path: str, stream: StreamConfig, seq_len: int) -> Iterator[Problem]:
    if not index.samples:
        yield Problem(path, stream.local, f"{index.folder} holds no samples")
    elif not index.has_tokens():
        columns = ", ".join(index.shards[0].get("column_names", []))
        yield Problem(path, stream.local, f"the shards have no column 'tokens' (columns: {columns})")
    else:
        for length in index.seq_lens() - {None, seq_len}:
            yield Problem(
                path,
                stream.local,
                f"holds samples of {length} tokens but data.seq_len is {seq_len}; "
                f"set data.seq_len: {length}, or prepare the text anew with --seq-len {seq_len}",
            )
    if stream.remote is None and not os.access(index.folder, os.W_OK) and any(_needs_unpacking(index)):
        yield Problem(
            path, stream.local, f"{index.folder} must be writable: StreamingDataset decompresses shards there"
        )


def _needs_unpacking(index: Index) -> Iterator[bool]:
    for shard in index.shards:
        yield bool(shard.get("zip_data")) and not (index.folder / shard["raw_data"]["basename"]).exists()


def _check_duplicate_folders(streams: dict[str, StreamConfig], split: str) -> Iterator[Problem]:
    seen: dict[Path, str] = {}
    for name, stream in streams.items():
        folder = stream_folder(stream).absolute()
        if folder in seen:
            yield Problem(
                f"data.{split}.streams.{name}.local",
                stream.local,
                f"is the folder of stream {seen[folder]} too; name it once",
            )
        seen.setdefault(folder, name)


def _check_size(samples: int, data: DataConfig, global_batch_size: int) -> Iterator[Problem]:
    nodes = data.num_canonical_nodes
    if samples < global_batch_size:
        path = "data.train" if data.train else "data.prepare.sources"
        yield Problem(path, samples, f"{samples} samples are less than one global batch of {global_batch_size}")
    elif not epoch_samples(samples, global_batch_size, nodes):
        step = math.lcm(global_batch_size, nodes)
        yield Problem(
            "data.num_canonical_nodes",
            nodes,
            f"an epoch is made of multiples of {step} samples (global batch {global_batch_size}, canonical nodes "
            f"{nodes}) but the training data has {samples}; choose a divisor of the global batch",
        )


def data_fingerprint(data: DataConfig) -> str:
    """Digest of the training data: the streams in order, their proportions and their shards' hashes, not their location.

    Raises ShardError if an index is missing: with a remote, call it after build_train_loader, which downloads it.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, stream in data.train_streams().items():
        index = read_index(stream_folder(stream))
        if index is None:
            raise ShardError(f"stream {name}: {stream_folder(stream)} holds no index.json")
        for shard in index.shards:
            raw = shard["raw_data"]
            digest.update(json.dumps([shard["samples"], raw["bytes"], raw["hashes"]], sort_keys=True).encode())
        digest.update(f"{stream.proportion}\n".encode())
    return digest.hexdigest()
