"""MDS shards, examined without torch: checks before a run, sizes, fingerprints."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.config.regular_file import read_json
from llmtrain.data.shards.index import FLAG_COLUMN, NOT_MARKED, Index, ShardError, read_index
from llmtrain.data.tokenize.end_of_document import stream_manifest
from llmtrain.errors import UserError
from llmtrain.objectives.section import ObjectiveSection
from llmtrain.schema.data import DataConfig, StreamConfig


def record_problems(data: DataConfig, objective: ObjectiveSection) -> Iterator[Problem]:
    """Streams of other records than the objective is of. None of folders that are not there yet."""
    streams, named = {"train": data.train_streams(), "validation": data.validation_streams()}, set[str]()
    for split, some in streams.items():
        for name, stream in some.items():
            if not Path(stream.local).expanduser().exists():
                continue
            manifest = stream_manifest(stream)
            chat = (manifest or {}).get("inputs", {}).get("chat")
            packing = (manifest or {}).get("inputs", {}).get("packing")
            reason = objective.records_refusal(chat and chat["format"])
            if packing is not None and objective.packing not in (None, packing):
                reason = f"is packed ({packing}); `llmtrain prepare` makes samples of one prompt with packing: {objective.packing}"
            if reason:
                path = "data.prepare" if data.prepare is not None else f"data.{split}.streams.{name}"
                if stream.local not in named or data.prepare is None:  # both splits of prepare's are one folder
                    yield Problem(path, stream.local, reason)
                named.add(stream.local)


def require_records(data: DataConfig, objective: ObjectiveSection) -> None:
    """Raise UserError for the first of `record_problems`."""
    for problem in record_problems(data, objective):
        raise UserError(f"{problem.path}: {problem.found} {problem.message}")


_REMOTES = ("s3", "gs", "oci", "hf", "sftp", "azure", "azure-dl", "dbfs", "alipan")
"""Schemes of remotes."""
_SHARDS_IN_CACHE = 4
"""That a cache has room for at least."""


def stream_folder(stream: StreamConfig) -> Path:
    return Path(stream.local).expanduser() / (stream.split or "")


def epoch_samples(samples: int, global_batch_size: int, num_canonical_nodes: int) -> int:
    """Samples of one epoch: the largest number of whole global batches that the canonical nodes share evenly.

    StreamingDataset repeats samples to fill a remainder, differently for each number of ranks; without a remainder the
    order is the same on any number. The samples left out, fewer than lcm(batch, nodes), differ between epochs when
    shuffling.
    """
    return samples // (step := math.lcm(global_batch_size, num_canonical_nodes)) * step


def epoch_streams(data: DataConfig, samples: Sequence[int]) -> list[int]:
    """Samples that an epoch reads of each training stream. samples: of each, all that it has."""
    wanted = []
    for stream, size in zip(data.train_streams().values(), samples, strict=True):
        if stream.tokens is not None:
            size = max(round(stream.tokens / data.seq_len), 1)
        elif stream.repeats is not None:
            size = max(round(stream.repeats * size), 1)
        wanted.append(size)
    return wanted


def require_epoch(data: DataConfig, samples: Sequence[int], global_batch_size: int) -> int:
    """`epoch_samples` of the training data. samples: of each stream. Raises ShardError if it has less than one global batch."""
    total = sum(epoch_streams(data, samples))
    if size := epoch_samples(total, global_batch_size, data.num_canonical_nodes):
        return size
    raise ShardError(
        f"the training data has {total} samples; one epoch needs a multiple of both the global "
        f"batch ({global_batch_size}) and data.num_canonical_nodes ({data.num_canonical_nodes})"
    )


def stream_samples(data: DataConfig) -> list[int] | None:
    """Samples of each training stream; None while one of their indexes is not on this machine, or is none."""
    try:
        indexes = [read_index(stream_folder(stream)) for stream in data.train_streams().values()]
    except ShardError:
        return None
    return [index.samples for index in indexes if index] if all(indexes) else None


def steps_per_epoch(data: DataConfig, global_batch_size: int) -> int | None:
    """Optimizer steps of one epoch; None while an index of the training data is not on this machine, or is none."""
    if (found := stream_samples(data)) is None:
        return None
    samples = sum(epoch_streams(data, found))
    return epoch_samples(samples, global_batch_size, data.num_canonical_nodes) // global_batch_size or None


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
            samples = sum(epoch_streams(data, [index.samples for index in indexes]))
            problems += _check_size(samples, data, global_batch_size)
            problems += _check_cache(indexes, data)
    return problems


def check_trained(data: DataConfig) -> Iterator[Problem]:
    """Problems of an objective that needs marks of trained tokens, which the shards do not have."""
    for split, streams in (("train", data.train_streams()), ("validation", data.validation_streams())):
        for name, stream in streams.items():
            index = read_index(stream_folder(stream))
            if index is not None and not all(FLAG_COLUMN in kind["column_names"] for kind in index.shards.kinds):
                path = f"data.{split}.streams.{name}.local" if getattr(data, split) else "data.prepare.out"
                yield Problem(path, stream.local, NOT_MARKED)


def check_vocabulary(data: DataConfig, vocab_size: int) -> list[Problem]:
    """Problems with model.vocab_size: smaller than the tokenizer in the manifest of `llmtrain prepare`."""
    problems = []
    folders = {stream.local for stream in [*data.train_streams().values(), *data.validation_streams().values()]}
    for folder in sorted(folders):
        try:
            manifest = read_json(Path(folder).expanduser() / "manifest.json")
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
    if stream.remote and (reason := _remote_problem(stream)):
        return None, [Problem(f"{path}.remote", stream.remote, reason)]
    if index is None:
        return None, [] if stream.remote or (not explicit and not folder.exists()) else [
            Problem(local, stream.local, _advice(folder))
        ]
    return index, list(_check_index(index, local, stream, seq_len))


def _remote_problem(stream: StreamConfig) -> str | None:
    """Reason why StreamingDataset could fetch nothing from a remote; None where only a request would tell."""
    remote = stream.remote or ""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", remote)
    if scheme and scheme[1] not in _REMOTES:
        return f"StreamingDataset reads {', '.join(_REMOTES)} or a path"
    if scheme:
        return None if scheme[2] == "//" and scheme[3] else f"names no place; expected {scheme[1]}://BUCKET/FOLDER"
    folder = Path(remote).expanduser() / (stream.split or "")
    return None if (folder / "index.json").is_file() else f"{folder} holds no index.json of MDS shards"


def _advice(folder: Path) -> str:
    state = "holds no index.json of MDS shards" if folder.is_dir() else "does not exist"
    return f"{folder} {state}; make it with `llmtrain prepare SOURCE... --out {folder.parent}`, or give remote"


def _check_index(index: Index, path: str, stream: StreamConfig, seq_len: int) -> Iterator[Problem]:
    if not index.samples:
        yield Problem(path, stream.local, f"{index.folder} holds no samples")
    elif not index.has_tokens():
        columns = ", ".join(index.shards[0]["column_names"])
        yield Problem(path, stream.local, f"the shards have no column 'tokens' (columns: {columns})")
    elif fault := index.token_fault():
        yield Problem(path, stream.local, f"{index.folder}/index.json: {fault}")
    else:
        for length in index.seq_lens() - {None, seq_len}:
            yield Problem(
                path,
                stream.local,
                f"holds samples of {length} tokens but data.seq_len is {seq_len}; "
                f"set data.seq_len: {length}, or prepare the text anew with --seq-len {seq_len}",
            )
    if stream.remote is None and (missing := _missing_shards(index)):
        yield Problem(
            path,
            stream.local,
            f"{index.folder} lacks {len(missing):,} of {len(index.shards):,} shards that its index.json names, {missing[0]} "
            "first; copy them here, or give remote",
        )
    if stream.remote is None and not os.access(index.folder, os.W_OK) and any(_needs_unpacking(index)):
        yield Problem(path, stream.local, f"{index.folder} must be writable: shards are unpacked there")


def _missing_shards(index: Index) -> list[str]:
    """Names of shards of which neither the raw nor the compressed file is there."""
    here: dict[str, set[str]] = {}
    missing = []
    for files in index.shards.names():
        names = [name for name in files if name]
        for folder, name in map(os.path.split, names):
            if folder not in here:
                place = Path(index.folder, folder)
                here[folder] = set(os.listdir(place)) if place.is_dir() else set()
            if name in here[folder]:
                break
        else:
            missing.append(names[0])
    return missing


def _needs_unpacking(index: Index) -> Iterator[bool]:
    for shard in index.shards:
        yield bool(shard["zip_data"]) and not Path(index.folder, shard["raw_data"]["basename"]).exists()


def cache_fault(limit: int, indexes: int, largest: int, readers: int) -> str | None:
    """Reason why a cache of `limit` bytes has no room for what `readers` processes of a node read; None: it has. indexes: bytes of
    all. largest: bytes of the largest shard, packed and unpacked."""
    count = max(_SHARDS_IN_CACHE, readers)
    if limit >= (least := indexes + count * largest):
        return None
    each = f", one for each of {readers} processes of the loader" if readers > _SHARDS_IN_CACHE else ""
    return (
        f"has no room for the shards: beside the index of {indexes:,} bytes {count} of the largest, of {largest:,} bytes, must "
        f"fit{each}; give at least {least:,}, or better several times that"
    )


def _check_cache(indexes: Sequence[Index], data: DataConfig) -> Iterator[Problem]:
    """The rule of `cache_fault`, for one rank on each node: only training knows of more."""
    if data.cache_limit is None:
        return
    sizes = (size for index in indexes for size in zip(index.shards.raw_bytes, index.shards.zip_bytes, strict=True))
    largest = max(map(sum, sizes), default=0)
    stored = sum(Path(index.folder, "index.json").stat().st_size for index in indexes)
    if reason := cache_fault(data.cache_limit, stored, largest, max(data.num_workers, 1)):
        yield Problem("data.cache_limit", data.cache_limit, reason)


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
    indexes = []
    for name, stream in data.train_streams().items():
        index = read_index(stream_folder(stream))
        if index is None:
            raise ShardError(f"stream {name}: {stream_folder(stream)} holds no index.json")
        indexes.append(index)
    return fingerprint_of(data, indexes)


def fingerprint_of(data: DataConfig, indexes: Sequence[Index]) -> str:
    """`data_fingerprint` of training streams with these indexes."""
    shares = []
    for stream in data.train_streams().values():
        budget = f" {stream.repeats} {stream.tokens}" if stream.is_budget else ""
        shares.append(f"{stream.proportion}{budget}\n")
    key = tuple((index.shards.digest, share) for index, share in zip(indexes, shares, strict=True))
    if key not in _FINGERPRINTS:
        digest = hashlib.blake2b(digest_size=16)
        for index, share in zip(indexes, shares, strict=True):
            for shard in index.shards:
                raw = shard["raw_data"]
                digest.update(json.dumps([shard["samples"], raw["bytes"], raw["hashes"]], sort_keys=True).encode())
            digest.update(share.encode())
        _FINGERPRINTS[key] = digest.hexdigest()
    return _FINGERPRINTS[key]


_FINGERPRINTS: dict[tuple[tuple[str, str], ...], str] = {}
"""Of indexes and shares that this process has met: every checkpoint asks."""
