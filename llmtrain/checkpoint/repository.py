"""The choice of a checkpoint: all of a run, the newest that can be used, or the one that a user names. No torch here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, FormatError, Manifest
from llmtrain.checkpoint.local import list_local
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.stored import list_stored
from llmtrain.checkpoint.stores.base import ObjectStore, StoreError
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.config.addresses import is_remote
from llmtrain.logs import log

Warn = Callable[[str], None]
T = TypeVar("T")
_READS = 5
"""Attempts to read a checkpoint before it is deleted."""
AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)


def silent(text: str) -> None:
    """A warning that is not shown."""


def usable(
    candidates: Iterable[AnyCheckpoint], warn: Warn, check: Callable[[AnyCheckpoint], object] = Checkpoint.require
) -> Iterator[AnyCheckpoint]:
    """Members of `candidates`, newest first, that pass `check`; damaged ones are passed over with a warning, and those in
    progress without one.

    check: raises CheckpointError for a checkpoint that is damaged.
    Raises FormatError rather than go back behind a checkpoint of another llmtrain, StoreError if a store does not answer.
    """
    for candidate in candidates:
        if candidate.in_progress:
            continue
        try:
            check(candidate)
        except (FormatError, StoreError):
            raise
        except CheckpointError as error:
            warn(f"{error}; trying the one before")
        else:
            yield candidate


class Repository:
    """The checkpoints at one place: a run's folder, its `checkpoints/`, either in a store, or a single checkpoint.

    place: a path, an address with a scheme (`s3://bucket/prefix`), or a store. Methods raise StoreError if a store does not
    answer.
    """

    def __init__(self, place: Path | str | ObjectStore):
        if isinstance(place, str) and is_remote(place):
            place = open_store(place)
        self._place = Path(place).expanduser() if isinstance(place, (str, Path)) else place
        self.address = str(self._place) if isinstance(self._place, Path) else self._place.url

    def checkpoints(self) -> Sequence[Checkpoint]:
        """Oldest first, whole or not; none where there is no such place."""
        return list_local(self._place) if isinstance(self._place, Path) else list_stored(self._place)

    def require_any(self) -> Sequence[Checkpoint]:
        """`checkpoints()`. Raises CheckpointError, with what is there instead, if there are none."""
        if found := self.checkpoints():
            return found
        path = self._place
        if not isinstance(path, Path):
            raise CheckpointError(f"{self.address} holds no checkpoint")
        if not path.exists():
            raise CheckpointError(f"{path}: no such folder; expected a run's folder or a checkpoint in one")
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file; expected a run's folder or a checkpoint's")
        if (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} is a model in Hugging Face format, no checkpoint of llmtrain; `llmtrain import {path} OUT` makes one"
            )
        raise CheckpointError(f"{path} holds no checkpoint (neither {manifests.NAME} nor checkpoints/step-*)")

    def newest(self, warn: Warn, check: Callable[[Checkpoint], object] = Checkpoint.require) -> Checkpoint | None:
        """The newest one that can be used; see `usable`."""
        return next(usable(reversed(self.checkpoints()), warn, check), None)

    def find(self, warn: Warn = log.warning) -> Checkpoint:
        """The checkpoint that the address names, or the newest one of the run there that can be used; see `usable`.

        Raises CheckpointError, with what is there instead, if there is none.
        """
        found = self.require_any()
        if found[0].address == self.address:
            found[0].require()
            return found[0]
        for checkpoint in usable(reversed(found), warn):
            return checkpoint
        raise CheckpointError(f"{self.address}: none of its checkpoints is complete")

    def open(self) -> tuple[Path, Manifest]:
        """(local folder, manifest) of what `find` finds; a checkpoint in a store is copied to this machine first."""
        checkpoint = self.find()
        return checkpoint.fetch(), checkpoint.require()

    def read(self, read: Callable[[Path, Manifest], T]) -> T:
        """`read(*self.open())`. Where the run deletes that checkpoint meanwhile, as it does once it has newer ones, the same with
        the newest one then."""
        for _ in range(_READS):
            folder, manifest = self.open()
            try:
                return read(folder, manifest)
            except Exception as error:  # whatever a library makes of a file that is gone
                if folder == self._place or (folder / manifests.NAME).exists():
                    raise
                log.info(
                    f"{folder} was deleted by its run while it was read ({type(error).__name__}): reading the newest one"
                )
        return read(*self.open())

    def prune(self, retention: Retention, awaited: AbstractSet[int] = frozenset()) -> None:
        """Delete the checkpoints that need not be retained, and what is not whole and older than these.

        Only whole ones count as retained: damaged ones never displace a good one. Here, a damaged one among the newest
        `last` stays, to be examined; in a store it is an upload or deletion that was cut short, and goes. Those of another
        format stay.
        awaited: steps that are still to be uploaded.
        """
        if retention.last is None:
            return
        found = [checkpoint for checkpoint in self.checkpoints() if not isinstance(checkpoint.problem, FormatError)]
        whole = sorted(checkpoint.step for checkpoint in found if checkpoint.manifest)
        if not whole:
            return
        retained = retention.retained(whole) | awaited
        end = whole[-retention.last :][0] if isinstance(self._place, Path) else whole[-1]
        for checkpoint in found:
            if checkpoint.step < end and checkpoint.step not in retained and checkpoint.own:
                checkpoint.delete()
