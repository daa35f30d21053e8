"""The interface of a place for checkpoints besides the run's own disk. No torch here."""

from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol

from llmtrain.checkpoint.format.manifest import CheckpointError


class StoreError(CheckpointError):
    """The store cannot be reached, refuses, or does not keep what it was given; the message has the object and the reason."""


class ObjectStore(Protocol):
    """Objects under one address, by name (`step-00000100/manifest.json`). Every method may be called from any thread.

    All raise StoreError, after as many attempts as are worth it.
    """

    url: str
    """The address, without a slash at the end."""

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins with `prefix`, by name; without those that are only partly sent."""
        ...

    def read(self, name: str) -> bytes:
        """Content of a small object. Raises FileNotFoundError if there is none."""
        ...

    def holds(self, name: str, size: int, digest: str) -> bool:
        """True if the object exists with this size and this xxh3_128 (hex)."""
        ...

    def put(self, name: str, file: BinaryIO, size: int, digest: str, sent: Callable[[int], None]) -> None:
        """Store a file's `size` bytes; the object appears whole. Parts that an earlier attempt has sent are not sent again.

        sent: called with the bytes of each part that went over the wire.
        Raises CheckpointError, storing nothing, when the bytes are not those of `digest`.
        """
        ...

    def stream(self, name: str, size: int) -> Iterator[bytes]:
        """The object's bytes, piece by piece. Raises StoreError when there are not `size` of them."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        ...

    def abandon(self, prefix: str) -> None:
        """Delete the parts of objects whose names begin so and that were never completed."""
        ...
