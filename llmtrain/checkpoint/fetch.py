"""The newest checkpoint of a run, downloaded from its store before the ranks start. No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.local import folders
from llmtrain.checkpoint.repository import Repository, usable
from llmtrain.checkpoint.stored import LOCK, StoredCheckpoint, list_stored
from llmtrain.checkpoint.stores.base import StoreError
from llmtrain.checkpoint.stores.open import open_store
from llmtrain.config.locks import locked
from llmtrain.progress import ByteBar

_ASKED = ".remote-asked"


@dataclass(frozen=True)
class Fetched:
    """folder: what this call downloaded. verified: save_id of the newest checkpoint here, if its hashes were compared."""

    folder: Path | None = None
    verified: str | None = None


def fetch_newest(
    address: str,
    root: Path,
    *,
    launch: str | None,
    verify: bool,
    notify: Callable[[str], None],
    progress: bool = False,
    in_place: bool = False,
) -> Fetched:
    """Make sure that the newest complete checkpoint of local folder and store is in the local folder `root`.

    Every rank of a run calls this before the process group exists: one of them asks the store and downloads, the others
    wait for it at a lock. launch: a name that the ranks of this start have in common; None for a single process.
    verify: look for the newest local one by its hashes, so that one that was damaged here is fetched again.
    in_place: the run went on here until now, so that nothing in the store is newer than the newest in `root`: where that one is
    good the store is not asked, which may answer slowly or not at all.
    A checkpoint that turns out damaged in the store is named, and the one before it is tried.
    Raises CheckpointError where the store holds checkpoints and neither it nor `root` a good one; StoreError when the store
    cannot be asked: going on from an older checkpoint, or from nothing, would make a second run of it.
    """
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / LOCK, "fetches a checkpoint"):
        asked = root / _ASKED
        if launch is not None and asked.is_file():
            last, _, verified = asked.read_text().partition("\n")
            if last == launch:
                return Fetched(verified=verified or None)
        found = _fetch(address, root, verify, notify, progress, in_place)
        if launch is not None:
            asked.write_text(f"{launch}\n{found.verified or ''}")
        return found


def _fetch(
    address: str, root: Path, verify: bool, notify: Callable[[str], None], progress: bool, in_place: bool
) -> Fetched:
    def warn(text: str) -> None:
        notify(f"WARNING: {text}")

    def good_here() -> Checkpoint | None:
        return Repository(root).newest(warn, lambda found: found.verify() if verify else found.require())

    def fetched(here: Checkpoint | None) -> Fetched:
        return Fetched(verified=here.require().save_id if here and verify else None)

    here = good_here() if in_place else None
    if here is not None and here.address == str(folders(root)[-1]):
        return fetched(here)
    try:
        there = list_stored(open_store(address))
        if not there and list_stored(open_store(address)):  # before a run begins anew in a place that is in use
            raise StoreError(f"{address} lists its objects otherwise each time")
    except StoreError as error:
        raise StoreError(
            f"checkpoint.remote cannot be asked for a newer checkpoint: {error}. "
            "Try again when it can, or go on without it: checkpoint.remote=null"
        ) from None
    here = here or good_here()

    def download(checkpoint: StoredCheckpoint) -> None:
        checkpoint.require()
        reason = f"{root} has step {here.step}" if here else f"{root} has none that is good"
        notify(f"downloading {checkpoint.address} ({checkpoint.nbytes / 1e6:,.1f} MB): {reason}")
        with ByteBar(progress, checkpoint.nbytes, title="download") as bar:
            downloaded.append(checkpoint.download(root, bar.advance))

    downloaded: list[Path] = []
    newer = [checkpoint for checkpoint in there if here is None or checkpoint.step > here.step]
    for checkpoint in usable(reversed(newer), warn, download):
        return Fetched(downloaded[-1], checkpoint.require().save_id)
    if here is None and (damaged := [checkpoint for checkpoint in there if not checkpoint.in_progress]):
        raise CheckpointError(
            f"checkpoint.remote ({address}): none of its {len(damaged)} checkpoint(s) can be used (see above), and {root} has none "
            "that is good. Put an intact copy back; or begin another run: elsewhere, with checkpoint.remote=null, or after "
            f"llmtrain checkpoint rm {address} --before {damaged[-1].step + 1} --force"
        )
    for checkpoint in there if here is None else ():
        warn(f"{checkpoint.address} is no complete checkpoint, an upload that was cut short: the run begins anew")
    return fetched(here)


def refuse_used(address: str) -> None:
    """Raise CheckpointError if a store holds checkpoints where a new run would upload its own: the next start would resume
    from them."""
    if found := list_stored(open_store(address)):
        raise CheckpointError(
            f"--fresh: checkpoint.remote ({address}) holds {len(found)} checkpoint(s) of an earlier run, up to step "
            f"{found[-1].step}; name another place, or delete them: "
            f"llmtrain checkpoint rm {address} --before {found[-1].step + 1} --force"
        )
