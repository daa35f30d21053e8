"""A checkpoint in any place, as listings, lookups and deletions use it. No torch here."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest, NewerFormatError, OldFormatError

Progress = Callable[[int], None]
"""Called with the bytes of each piece that was read or sent."""


def no_progress(nbytes: int) -> None:
    """Progress that is not shown."""


class Checkpoint(ABC):
    """A checkpoint in a local folder or in a store, or the remains of one.

    name: such as `step-00000100`. address: its path or URL. nbytes: of all its files. written: in seconds since the epoch;
    None where the store does not record it.
    manifest: None if the checkpoint is not whole, or of another format; `problem` is the reason. Sizes were compared, no
    content was read.
    partial: it has no manifest. in_progress: it is being written or deleted, or was when the process ended; it is then no
    damage that it is not whole.
    """

    name: str
    address: str

    @property
    @abstractmethod
    def step(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    @abstractmethod
    def written(self) -> float | None: ...

    @property
    @abstractmethod
    def partial(self) -> bool: ...

    @property
    @abstractmethod
    def in_progress(self) -> bool: ...

    @abstractmethod
    def _read(self) -> Manifest | CheckpointError:
        """The manifest, or the reason why there is none that can be used."""

    @property
    @abstractmethod
    def own(self) -> bool:
        """True if nothing but a checkpoint's files is there: it may be deleted without being asked for."""

    @abstractmethod
    def read_index(self) -> Index:
        """Read its index. Raises CheckpointError."""

    @abstractmethod
    def verify(self, progress: Progress = no_progress) -> None:
        """Read every byte. Raises CheckpointError with the first file that is not as it was written."""

    @abstractmethod
    def fetch(self) -> Path:
        """The local folder that holds it: its own, or a copy that is made now. Raises CheckpointError."""

    @abstractmethod
    def delete(self) -> None:
        """Delete it; if this is interrupted, the remains are no checkpoint. Raises CheckpointError."""

    @cached_property
    def _found(self) -> Manifest | CheckpointError:
        return self._read()

    @property
    def manifest(self) -> Manifest | None:
        return self._found if isinstance(self._found, Manifest) else None

    @property
    def problem(self) -> CheckpointError | None:
        return None if isinstance(self._found, Manifest) else self._found

    def require(self) -> Manifest:
        """The manifest. Raises CheckpointError if it is not whole, FormatError if it is of another format."""
        if isinstance(self._found, CheckpointError):
            raise self._found
        return self._found

    @property
    def health(self) -> str:
        """One phrase for a table: complete, partial, another format, or the damage."""
        if self.in_progress:
            return "partial (being written or deleted, or cut short)"
        if isinstance(self.problem, NewerFormatError):
            return "newer format: update llmtrain"
        if isinstance(self.problem, OldFormatError):
            return "format 1: `llmtrain checkpoint convert` reads it"
        return "complete" if self.problem is None else f"damaged: {self._damage()}"

    @property
    def age(self) -> str:
        """`3 h`; empty where it is not known."""
        if self.written is None:
            return ""
        seconds = max(time.time() - self.written, 0)
        for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
            if seconds >= 2 * length:
                return f"{seconds / length:.0f} {unit}"
        return f"{seconds:.0f} s"

    def _damage(self) -> str:
        """The problem without the address, which is in the table already."""
        text = str(self.problem).removeprefix(self.address)
        for beginning in (" is damaged: ", " is incomplete: ", ": ", " ", "/"):
            text = text.removeprefix(beginning)
        return text
