"""Upload of a run's checkpoints in the background. Training never waits for it, nor stops when it fails. No torch here."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.local import folders, step_of
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.retention import Retention
from llmtrain.checkpoint.stores.base import ObjectStore
from llmtrain.checkpoint.upload import GoneError, upload
from llmtrain.config.regular_file import read_bytes
from llmtrain.logs import log

_LOOK_SECONDS = 1.0
_AGAIN_SECONDS, _AGAIN_AT_MOST_SECONDS = 30.0, 900.0


class Uploader:
    """Watches a run's folder of checkpoints, and uploads each that is complete: the newest first.

    Only the folder matters, so that checkpoints which an earlier, killed run left are uploaded too. An upload that fails is
    reported through `notify`, and tried again with growing pauses, or as soon as there is a newer checkpoint. After each
    upload the store is pruned (see Repository.prune).

    One per run, on rank 0. It begins at once; call close().
    """

    def __init__(
        self,
        store: ObjectStore,
        root: Path,
        retention: Retention,
        *,
        notify: Callable[[str], None] = log.info,
        look_seconds: float = _LOOK_SECONDS,
        again_seconds: float = _AGAIN_SECONDS,
    ):
        self._store, self._root, self._retention, self._notify = store, root, retention, notify
        self._look_seconds, self._again_seconds = look_seconds, again_seconds
        self._done: dict[int, str] = {}  # step -> the save that needs nothing more
        self._failures, self._not_before = 0, 0.0
        self._tried: tuple[int, str] | None = None  # the newest that failed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="uploader", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, as `close` does; True once everything is uploaded or has failed once more."""
        self._closing.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def close(self, seconds: float | None = None) -> bool:
        """Wait, at most so long, until every checkpoint is uploaded or has failed once more. True if all are uploaded; if not,
        reports it: the next start of the run continues the upload."""
        self.wait(seconds)
        left = [folder for folder, _ in self._pending()]
        if left:
            unfinished = "is not finished" if self._thread.is_alive() else "failed"
            self._notify(
                f"WARNING: the upload of {', '.join(folder.name for folder in left)} to {self._store.url} {unfinished}. "
                f"They are whole in {self._root}; the same command again goes on with the upload"
            )
        return not left

    def _watch(self) -> None:
        while True:
            closing = self._closing.is_set()  # read before looking: what is saved before close() is found
            pending = self._pending()
            due = bool(pending) and (closing or self._due(pending[0]))
            if due and (self._upload(*pending[0]) or not closing):
                continue
            if closing:
                return
            self._closing.wait(self._look_seconds)

    def _pending(self) -> list[tuple[Path, str]]:
        """(folder, save id) of the complete checkpoints that are still to be uploaded, newest first."""
        found: list[tuple[Path, str]] = []
        for folder in folders(self._root):
            try:
                save_id = manifests.parse(folder, read_bytes(folder / manifests.NAME)).save_id
            except (OSError, CheckpointError):
                continue  # gone meanwhile, or damaged: the run itself will report it
            found.append((folder, save_id))
        retained = self._retention.retained(step_of(folder) for folder, _ in found)
        steps = [(step_of(folder), folder, save_id) for folder, save_id in reversed(found)]
        return [
            (folder, save_id) for step, folder, save_id in steps if step in retained and self._done.get(step) != save_id
        ]

    def _due(self, item: tuple[Path, str]) -> bool:
        return (step_of(item[0]), item[1]) != self._tried or time.monotonic() >= self._not_before

    def _upload(self, folder: Path, save_id: str) -> bool:
        step = step_of(folder)
        try:
            done = upload(self._store, folder)
            if done.sent:
                rate = done.sent / max(done.seconds, 1e-9) / 1e6
                size = f"{done.sent / 1e6:,.1f} MB in {done.seconds:.1f} s, {rate:,.0f} MB/s"
                self._notify(f"uploaded {folder.name} to {done.url} ({size})")
            self._prune()
        except GoneError as error:
            self._notify(f"{error} (uploads take longer than checkpoint.keep_last allows)")
        except Exception as error:  # whatever it is, training goes on
            self._failures += 1
            pause = min(self._again_seconds * 2 ** (self._failures - 1), _AGAIN_AT_MOST_SECONDS)
            self._tried, self._not_before = (step, save_id), time.monotonic() + pause
            again = "" if self._closing.is_set() else f"; again in {pause:.0f} s, or with the next checkpoint"
            reason = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._notify(f"WARNING: {folder.name} was not uploaded to {self._store.url}: {reason}{again}")
            return False
        self._failures, self._tried = 0, None
        self._done[step] = save_id
        return True

    def _prune(self) -> None:
        awaited = {step_of(folder) for folder, _ in self._pending()}
        Repository(self._store).prune(self._retention, awaited)
