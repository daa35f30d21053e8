"""Where checkpoints are kept besides the run's own disk: an S3-compatible object store, or a mounted folder. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from llmtrain.checkpoint.manifest import CheckpointError
from llmtrain.config.addresses import address_problem


class RemoteError(CheckpointError):
    """The store cannot be reached, refuses, or does not keep what it was given; the message says which object and why."""


class Bucket(Protocol):
    """Objects under one address, by name (`step-00000100/manifest.json`). Every method may be called from any thread.

    All raise RemoteError, after as many attempts as are worth it.
    """

    url: str
    """The address, without a slash at the end."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins so. What is half sent is not among them."""
        ...

    def read(self, name: str) -> bytes:
        """A small object. Raises FileNotFoundError when there is none."""
        ...

    def holds(self, name: str, size: int, digest: str) -> bool:
        """Whether the object is there with this size and this xxh3_128 (hex)."""
        ...

    def put(self, name: str, file: BinaryIO, size: int, digest: str, sent: Callable[[int], None]) -> None:
        """Stores a file's `size` bytes; the object appears whole. Parts that an earlier attempt has sent are not sent again.

        sent: is told the bytes of each part that went over the wire.
        Raises CheckpointError, storing nothing, when the bytes are not those of `digest`.
        """
        ...

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        """The object's bytes, piece by piece. Raises RemoteError when there are not `size` of them."""
        ...

    def delete(self, name: str) -> None:
        """Also when there is no such object."""
        ...

    def abandon(self, prefix: str) -> None:
        """Forgets what was sent of objects that were never completed."""
        ...


def open_bucket(address: str) -> Bucket:
    """The store at `s3://bucket/prefix`, `file:///folder` or a plain path. Asks it nothing yet."""
    if problem := address_problem(address):
        raise RemoteError(f"{address} {problem}")
    scheme, separator, rest = address.partition("://")
    if separator and scheme == "s3":
        from llmtrain.checkpoint.remote.s3 import S3Bucket

        name, _, prefix = rest.partition("/")
        return S3Bucket(name, prefix.rstrip("/"))
    from llmtrain.checkpoint.remote.mounted import MountedBucket

    return MountedBucket(Path(rest if separator else address).expanduser())
