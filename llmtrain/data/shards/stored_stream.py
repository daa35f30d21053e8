"""A stream's shards as they are stored, on this machine or in a store: read without a StreamingDataset, and without writing.

A shard is taken from the first place that has it, unpacked or packed, and compared with its index.
"""

import functools
import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from llmtrain.config.addresses import is_remote
from llmtrain.data.inspect.sample_documents import SampleDocuments
from llmtrain.data.partitions.prepared_folder import MANIFEST, read_manifest
from llmtrain.data.shards.index import (
    FLAG_COLUMN,
    NUMBERS,
    TOKEN_COLUMNS,
    Index,
    ShardError,
    parse_index,
    read_index,
    verify_shard,
)
from llmtrain.data.sources.storage import open_file
from llmtrain.data.tokenize.tokenizer import CHAT_TEMPLATE, GENERATION_CONFIG, TextTokenizer, load_tokenizer
from llmtrain.errors import RunError
from llmtrain.schema.data import StreamConfig


@dataclass(frozen=True)
class StoredStream:
    """The shards of one stream. places: the folders or addresses that may hold them, the nearest first."""

    name: str
    places: tuple[str, ...]
    index: Index

    @functools.cached_property
    def ends(self) -> NDArray[np.int64]:
        """Samples up to the end of each shard."""
        return np.cumsum(np.asarray(self.index.shards.samples))

    def shard_of(self, sample: int) -> tuple[int, int]:
        """(shard, row in it) of a sample. Raises ShardError if there is no such sample."""
        if not 0 <= sample < self.index.samples:
            raise ShardError(f"{self.name} has samples 0 to {self.index.samples - 1:,}; there is no {sample:,}")
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        return shard, sample - (int(self.ends[shard - 1]) if shard else 0)

    def tokens(self, shard: int) -> NDArray:
        """Tokens of a shard's samples: [samples, seq_len]. Raises ShardError for a shard that is damaged, or cannot be had."""
        return self._tokens(shard)

    @functools.cached_property
    def _tokens(self) -> Callable[[int], NDArray]:
        return functools.lru_cache(maxsize=2)(self._decoded)

    def _decoded(self, shard: int) -> NDArray:
        if fault := self.index.token_fault():
            raise ShardError(f"{self.places[0]}/index.json: {fault}")
        return decode_tokens(self.verified(shard), self.index.shards[shard])

    def flags(self, shard: int) -> NDArray[np.uint8] | None:
        """Flags of the tokens of a shard of conversations (packing.py), [samples, seq_len]; None for one of texts."""
        entry = self.index.shards[shard]
        if FLAG_COLUMN not in entry["column_names"] or not all(entry["column_sizes"]):
            return None
        return _fixed_column(self.content(shard), entry, FLAG_COLUMN).view(np.uint8)

    def columns(self, shard: int) -> dict[str, NDArray]:
        """Further columns of numbers of a shard, as those of rollouts: [samples] or [samples, n], by name."""
        entry, found = self.index.shards[shard], dict[str, NDArray]()
        for name, encoding in zip(entry["column_names"], entry["column_encodings"], strict=True):
            kind, of, *_ = (*encoding.split(":"), "", "")
            if name in (*TOKEN_COLUMNS, FLAG_COLUMN) or not all(entry["column_sizes"]):
                continue
            if dtype := of if kind == "ndarray" else {"int": "int64"}.get(kind, kind if kind in NUMBERS else ""):
                values = _fixed_column(self.content(shard), entry, name).view(dtype)
                found[name] = values if kind == "ndarray" else values[:, 0]
        return found

    def content(self, shard: int) -> bytes:
        """The unpacked bytes of a shard, as they are. Raises ShardError where no place has it."""
        entry = self.index.shards[shard]
        for place in self.places:
            for part in (entry["raw_data"], entry["zip_data"]):
                if part is None:
                    continue
                found = read_file(f"{place}/{part['basename']}")
                if found is not None:
                    return found if part is entry["raw_data"] else unpack(found, entry["compression"])
        raise ShardError(f"the shard {entry['raw_data']['basename']} is not in {' or '.join(self.places)}")

    def verified(self, shard: int) -> bytes:
        """The unpacked bytes of a shard. Raises ShardError where no place has it, and for one that is not as the index says."""
        raw, entry = self.content(shard), self.index.shards[shard]
        if damage := verify_shard(io.BytesIO(raw), entry, self.index.hash_algorithm):
            raise ShardError(f"the shard {entry['raw_data']['basename']} of {self.places[0]} is damaged: {damage}")
        return raw

    def documents(self, seq_len: int) -> SampleDocuments:
        """The documents of its samples, of a folder that `prepare` wrote."""
        return SampleDocuments(self.root, self.split, self.index, seq_len)

    @property
    def root(self) -> Path | None:
        """The folder of `prepare` that it is a split of; None for shards of others, or in a store."""
        place = self.places[0]
        return Path(place).parent if not is_remote(place) and Path(place).parent.joinpath(MANIFEST).is_file() else None

    @property
    def manifest(self) -> dict[str, Any] | None:
        """The manifest in `root`. Raises PrepareError for one that is damaged."""
        return read_manifest(self.root) if self.root is not None else None

    def is_in(self, folder: Path) -> bool:
        """True if it is a split of that prepared folder."""
        return Path(self.places[0]).parent == folder

    @property
    def split(self) -> str:
        """The name of its split in `root`."""
        return Path(self.places[0]).name


def open_stream(name: str, stream: StreamConfig) -> StoredStream:
    """The stream of a config. Raises ShardError for one without an index, here or where its `remote` says."""
    split = stream.split or ""
    places = [str(Path(stream.local).expanduser() / split)]
    if stream.remote:
        places.append("/".join(part.rstrip("/") for part in (stream.remote, split) if part))
    for place in places:
        index = _index(place)
        if index is not None:
            return StoredStream(name, tuple(places), index)
    raise ShardError(f"{' and '.join(places)}: no index.json of MDS shards")


def open_place(place: str, name: str | None = None) -> StoredStream | None:
    """The stream of a folder or an address that holds an index.json; None where there is none."""
    place = place.rstrip("/") if is_remote(place) else str(Path(place).expanduser())
    index = _index(place)
    return None if index is None else StoredStream(name or place, (place,), index)


def _index(place: str) -> Index | None:
    if not is_remote(place):
        return read_index(Path(place))
    content = read_file(f"{place}/index.json")
    return None if content is None else parse_index(content, place)


def read_file(path: str) -> bytes | None:
    """The content of a path or an address; None where there is no such file. Raises ShardError for what is no regular file, or
    may not be read; RunError where a store fails."""
    try:
        with open_file(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ShardError(f"{path} cannot be read: {error.strerror or error}") from error
    except RunError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def unpack(content: bytes, compression: str) -> bytes:
    """The unpacked bytes of a shard. Raises ShardError for a damaged one."""
    try:
        if compression.partition(":")[0] in ("zstd", "zstandard"):
            return zstandard.ZstdDecompressor().decompressobj().decompress(content)
        from streaming.base.compression import decompress  # imports torch

        return decompress(compression, content)
    except Exception as error:  # each algorithm raises its own
        raise ShardError(f"damaged {compression} file: {error}") from error


def decode_tokens(raw: bytes, shard: dict[str, Any]) -> NDArray:
    """Tokens of all samples of an unpacked shard: [samples, seq_len]. Raises ShardError for samples that have none, or not
    equally many."""
    names, encodings, sizes = shard["column_names"], shard["column_encodings"], shard["column_sizes"]
    column = next((name for name in TOKEN_COLUMNS if name in names), None)
    if column is None:
        raise ShardError(f"the shard {shard['raw_data']['basename']} has no tokens (columns: {', '.join(names)})")
    samples = shard["samples"]
    at = names.index(column)
    offsets = np.frombuffer(raw, np.uint32, samples + 1, 4)
    kind = encodings[at].split(":")
    if all(sizes) and kind[0] == "ndarray" and len(kind) == 3 and samples:
        return _fixed_column(raw, shard, column).view(kind[1])
    from streaming.base.format.mds.encodings import mds_decode  # imports torch

    found: list[NDArray] = []
    for first in offsets[:-1].tolist():
        lengths = []
        for size in sizes:
            lengths.append(size or int.from_bytes(raw[first : first + 4], "little"))
            first += 0 if size else 4
        begin = first + sum(lengths[:at])
        value = mds_decode(encodings[at], raw[begin : begin + lengths[at]])
        found.append(np.frombuffer(value, np.int64) if isinstance(value, bytes) else np.asarray(value))
    if len({row.shape for row in found}) > 1:
        raise ShardError(f"the shard {shard['raw_data']['basename']} holds samples of several lengths")
    return np.stack(found) if found else np.zeros((0, 0), np.int64)


def _fixed_column(raw: bytes, shard: dict[str, Any], name: str) -> NDArray[np.uint8]:
    """Bytes of a column of an unpacked shard whose columns all have a fixed size: [samples, bytes]."""
    samples, sizes, at = shard["samples"], shard["column_sizes"], shard["column_names"].index(name)
    first = int.from_bytes(raw[4:8], "little")
    begin = sum(sizes[:at])
    rows = np.frombuffer(raw, np.uint8, samples * sum(sizes), first).reshape(samples, -1)
    return np.ascontiguousarray(rows[:, begin : begin + sizes[at]])


def find_tokenizer(streams: Sequence[StoredStream]) -> TextTokenizer | None:
    """The tokenizer beside the shards of a stream; None where there is none. Raises TokenizerError for one that is damaged."""
    for stream in streams:
        for place in stream.places:
            for folder in (place, place.rpartition("/")[0]):
                if found := _tokenizer(folder):
                    return found
    return None


def _tokenizer(folder: str) -> TextTokenizer | None:
    if not is_remote(folder):
        path = Path(folder, "tokenizer")
        return load_tokenizer(path) if path.is_dir() else None
    if folder.count("/") < 3:  # a bucket
        return None
    with tempfile.TemporaryDirectory() as copies:
        described = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE, GENERATION_CONFIG)
        for name in ("tokenizer.json", *described):
            if content := read_file(f"{folder}/tokenizer/{name}"):
                Path(copies, name).write_bytes(content)
        return load_tokenizer(copies) if Path(copies, "tokenizer.json").is_file() else None
