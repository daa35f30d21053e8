"""What a start needs from a store: the newest checkpoint of the run, or the one that a user names."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, FormatError, Manifest
from llmtrain.checkpoint.remote.bucket import RemoteError, open_bucket
from llmtrain.checkpoint.remote.catalogue import Stored, newest, stored
from llmtrain.checkpoint.remote.download import download
from llmtrain.logs import log
from llmtrain.progress import ByteBar

_LOCK = ".remote.lock"
_ASKED = ".remote-asked"


@dataclass(frozen=True)
class Brought:
    """folder: what this call downloaded. verified: save_id of the newest checkpoint here, when its hashes have been compared."""

    folder: Path | None = None
    verified: str | None = None


def bring_newest(
    address: str, root: Path, *, launch: str | None, verify: bool, say: Callable[[str], None], progress: bool = False
) -> Brought:
    """Makes sure that the newest complete checkpoint of local folder and store is in the local folder `root`.

    Every rank of a run calls this before the process group exists: one of them asks the store and downloads, the others
    wait for it at a lock. launch: what the ranks of this start have in common; None for one alone.
    verify: look for the newest local one by its hashes, so that one that was damaged here is fetched again.
    A checkpoint that turns out damaged in the store is named, and the one before it is tried.
    Raises RemoteError when the store cannot be asked: going on from an older checkpoint, or from nothing, would make a
    second run of it.
    """
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / _LOCK):
        asked = root / _ASKED
        if launch is not None and asked.is_file():
            of, _, verified = asked.read_text().partition("\n")
            if of == launch:
                return Brought(verified=verified or None)
        found = _bring(address, root, verify, say, progress)
        if launch is not None:
            asked.write_text(f"{launch}\n{found.verified or ''}")
        return found


def _bring(address: str, root: Path, verify: bool, say: Callable[[str], None], progress: bool) -> Brought:
    try:
        there = stored(open_bucket(address))
    except RemoteError as error:
        raise RemoteError(
            f"checkpoint.remote cannot be asked for a newer checkpoint: {error}. "
            "Try again when it can, or go on without it: checkpoint.remote=null"
        ) from None
    here = _newest_here(root, verify, say)
    step = here.step if here else -1
    for candidate in newest(there, warn=say):
        if candidate.step <= step:
            break
        what = f"{root} has step {step}" if here else f"{root} has none that is good"
        say(f"downloading {candidate.url} ({candidate.nbytes / 1e6:,.1f} MB): {what}")
        try:
            return Brought(_download(candidate, root, progress), candidate.require().save_id)
        except RemoteError:
            raise
        except CheckpointError as error:
            say(f"WARNING: {error}; trying the one before")
    return Brought(verified=here.save_id if here and verify else None)


def _newest_here(root: Path, verify: bool, say: Callable[[str], None]) -> Manifest | None:
    """Of the newest good checkpoint."""
    for folder in reversed(manifests.folders(root)):
        try:
            manifest = manifests.read(folder)
            if verify:
                manifests.verify(folder, manifest)
            return manifest
        except FormatError:
            raise
        except CheckpointError as error:
            say(f"WARNING: {error}")
    return None


def refuse_used(address: str) -> None:
    """For a run that starts anew. Raises CheckpointError when the store has checkpoints there: the next start would take
    them for this run's."""
    if found := stored(open_bucket(address)):
        raise CheckpointError(
            f"--fresh: checkpoint.remote ({address}) holds {len(found)} checkpoint(s) of an earlier run, up to step "
            f"{found[-1].step}; name another place, or delete them: "
            f"llmtrain checkpoint rm {address} --before {found[-1].step + 1} --force"
        )


def find(address: str, say: Callable[[str], None]) -> Stored:
    """The checkpoint at an address of a store, or the newest complete one of the run there. Raises CheckpointError."""
    found = stored(open_bucket(address))
    for candidate in newest(found, warn=say):
        return candidate
    if len(found) == 1:
        found[0].require()
    raise CheckpointError(f"{address} holds no {'complete ' if found else ''}checkpoint")


def manifest_of(address: str) -> Manifest:
    """Of the checkpoint that `local_copy` would bring."""
    return find(address, say=lambda text: None).require()


def local_copy(address: str) -> Path:
    """A checkpoint in a store, downloaded (once) to LLMTRAIN_CACHE (default ~/.cache/llmtrain), as a folder here.

    Any number of processes may ask at a time. Raises CheckpointError.
    """
    found = find(address, say=log.info)
    manifest = found.require()
    cache = Path(os.environ.get("LLMTRAIN_CACHE", "~/.cache/llmtrain")).expanduser() / "checkpoints"
    # The save, too, is in the name: another one of the same step is another folder.
    root = cache / hashlib.sha256(f"{found.url} {manifest.save_id}".encode()).hexdigest()[:16]
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / _LOCK):
        folder = root / manifests.folder_name(manifest.step)
        try:
            manifests.read(folder)
        except CheckpointError:
            log.info(f"downloading {found.url} ({found.nbytes / 1e6:,.1f} MB) to {folder}")
            _download(found, root, progress=sys.stderr.isatty())
    return folder


def _download(found: Stored, root: Path, progress: bool) -> Path:
    with ByteBar(progress, found.nbytes, title="download") as bar:
        return download(found, root, bar.advance)
