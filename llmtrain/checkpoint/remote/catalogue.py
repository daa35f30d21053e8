"""The checkpoints that a store holds: which there are, which are whole, and their files. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, FormatError, Manifest
from llmtrain.checkpoint.remote.bucket import Bucket, RemoteError

_STEP = re.compile(r"(checkpoints/)?step-\d{8}")


@dataclass(frozen=True)
class Stored:
    """A checkpoint in a store, or what there is of one.

    prefix: of its objects' names, such as `step-00000100/`; empty when the address itself is a checkpoint.
    sizes: bytes of its objects, by file name.
    manifest: None when `problem` says why it cannot be used.
    """

    bucket: Bucket
    prefix: str
    sizes: dict[str, int]
    manifest: Manifest | None
    problem: CheckpointError | None

    @property
    def url(self) -> str:
        return f"{self.bucket.url}/{self.prefix}".rstrip("/")

    @property
    def step(self) -> int:
        if self.prefix:
            return int(self.prefix[-9:-1])
        return self.manifest.step if self.manifest else 0

    @property
    def partial(self) -> bool:
        """Not complete, or not any more: an upload or a deletion was cut short, or goes on."""
        return manifests.NAME not in self.sizes

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def require(self) -> Manifest:
        """Its manifest. Raises CheckpointError when it has none that can be used."""
        if self.manifest is None:
            assert self.problem is not None
            raise self.problem
        return self.manifest


def stored(bucket: Bucket) -> list[Stored]:
    """Every checkpoint of a run in a store, oldest first, whole or not; or the one that the address itself is.

    The run's checkpoints are right under the address, or under `checkpoints/`, as in a run's folder.
    Raises RemoteError when the store cannot be asked.
    """
    by_prefix: dict[str, dict[str, int]] = {}
    for name, size in bucket.sizes().items():
        prefix, slash, file = name.rpartition("/")
        if prefix and not _STEP.fullmatch(prefix):
            continue
        by_prefix.setdefault(prefix + slash, {})[file] = size
    if manifests.NAME in by_prefix.get("", {}):
        return [_look(bucket, "", by_prefix[""])]
    by_prefix.pop("", None)
    return sorted((_look(bucket, prefix, sizes) for prefix, sizes in by_prefix.items()), key=lambda found: found.step)


def newest(found: list[Stored], warn: Callable[[str], None]) -> Iterator[Stored]:
    """Those that can be used, newest first. What is damaged is named through `warn`; of what is merely unfinished there
    is nothing to say. Raises FormatError rather than go back behind a checkpoint of another llmtrain."""
    for candidate in reversed(found):
        if isinstance(candidate.problem, FormatError):
            raise candidate.problem
        if candidate.manifest is not None:
            yield candidate
        elif not candidate.partial:
            warn(f"{candidate.problem}; trying the one before")


def delete(checkpoint: Stored) -> None:
    """Its manifest first: from then on it is no checkpoint, whatever interrupts the rest."""
    names = sorted(checkpoint.sizes, key=lambda name: name != manifests.NAME)
    for name in names:
        checkpoint.bucket.delete(checkpoint.prefix + name)
    checkpoint.bucket.abandon(checkpoint.prefix)


def _look(bucket: Bucket, prefix: str, sizes: dict[str, int]) -> Stored:
    url = f"{bucket.url}/{prefix}".rstrip("/")
    arguments: dict[str, Any] = {"bucket": bucket, "prefix": prefix, "sizes": sizes}
    try:
        manifest = manifests.parse(url, bucket.read(prefix + manifests.NAME))
        for name, record in manifest.files.items():
            if name not in sizes:
                raise CheckpointError(f"{url} is incomplete: {name} is missing")
            if sizes[name] != record["bytes"]:
                raise CheckpointError(f"{url} is damaged: {name} has {sizes[name]} bytes, not {record['bytes']}")
    except FileNotFoundError:
        problem = CheckpointError(f"{url} is not a complete checkpoint: it has no {manifests.NAME}")
        return Stored(**arguments, manifest=None, problem=problem)
    except RemoteError:
        raise
    except CheckpointError as error:
        return Stored(**arguments, manifest=None, problem=error)
    return Stored(**arguments, manifest=manifest, problem=None)
