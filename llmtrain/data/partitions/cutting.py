"""Cutting the files of a corpus into partitions: the units of work of `llmtrain prepare`, each made by one process.

The cut depends on the files alone. A large file is cut at fixed bytes where its format allows it. Small files are gathered, and
a gathering ends behind files whose names' hashes say so: so a file that is added changes the partition that it falls into, and
at most a few behind it.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.data.sources.files import SourceFile
from llmtrain.data.sources.formats import format_of
from llmtrain.data.sources.records import Slice, whole
from llmtrain.data.sources.token_kinds import token_kind

PARTITION_BYTES = 64 << 20
"""About the stored bytes of a partition."""


@dataclass(frozen=True)
class Partition:
    """Slices of files that one process turns into shards. id: of its inputs and of all settings that its shards depend on."""

    id: str
    slices: list[Slice]

    @property
    def stored_bytes(self) -> int:
        return sum(part.end - part.begin for part in self.slices)


def cut(files: list[SourceFile], text_key: str, partition_bytes: int | None = None) -> Iterator[list[Slice]]:
    """Divide the files into the slices of one partition after the other, in order."""
    size = partition_bytes or PARTITION_BYTES
    gathered: list[Slice] = []
    nbytes = 0
    for file in files:
        if file.size > size:
            if gathered:
                yield gathered
                gathered, nbytes = [], 0
            step = size if splits(file, text_key) else file.size
            for begin in range(0, file.size, step):
                yield [Slice(file, begin, min(begin + step, file.size))]
            continue
        if nbytes + file.size > 2 * size:
            yield gathered
            gathered, nbytes = [], 0
        gathered.append(whole(file))
        nbytes += file.size
        if nbytes >= size // 4 and _share(file.name) < file.size / size:
            yield gathered
            gathered, nbytes = [], 0
    if gathered:
        yield gathered


def splits(file: SourceFile, text_key: str) -> bool:
    """True if a part of the file can be read without what is before it."""
    if token_kind(file.path, file.from_folder):
        return True
    found = format_of(file.path, file.name, text_key, file.from_folder)
    return found is not None and found.splits


def _share(name: str) -> float:
    """A hash of a name, uniform in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def identify(parts: list[list[Slice]], marks: dict[SourceFile, str], settings: dict[str, Any]) -> list[Partition]:
    """Partitions with their ids. marks: of each file's content; settings: all else that the shards depend on, as JSON."""
    common = json.dumps(settings, sort_keys=True)
    seen: Counter[str] = Counter()
    partitions = []
    for slices in parts:
        digest = hashlib.blake2b(common.encode(), digest_size=8)
        for part in slices:
            inputs = f"{part.file.name}\0{marks[part.file]}\0{part.begin}\0{part.end}\0{part.file.from_folder}\n"
            digest.update(inputs.encode("utf-8", "surrogateescape"))
        content = digest.hexdigest()
        digest.update(str(seen[content]).encode())  # a file may be named twice
        seen[content] += 1
        partitions.append(Partition(digest.hexdigest(), slices))
    return partitions
