"""Whether a config may continue a run. No torch here: asked before any process group."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.checkpoint.lookup import find
from llmtrain.checkpoint.manifest import CheckpointError, Manifest, folders, latest
from llmtrain.checkpoint.remote.bucket import is_remote
from llmtrain.data.shards import ShardError, data_fingerprint
from llmtrain.schema.config import Config
from llmtrain.schema.load import differences


def check_resumption(config: Config) -> None:
    """Raises CheckpointError if `config.run_dir` holds a run that this config must not continue."""
    found = latest(Path(config.run_dir) / "checkpoints", warn=lambda text: None)  # the run itself will name them
    if found:
        refuse_another_meaning(config, *found)


def bring_newest_checkpoint(config: Config, launch: str | None, progress: bool) -> str | None:
    """Downloads the newest checkpoint of `checkpoint.remote` where it is newer than what is good here. Every rank calls this
    before the process group exists. launch: see fetch.bring_newest. Returns the save_id of the newest checkpoint here if its
    hashes have been compared on the way. Raises CheckpointError."""
    if config.checkpoint.remote is None:
        return None
    from llmtrain.checkpoint.remote.fetch import bring_newest

    root, verify = Path(config.run_dir) / "checkpoints", config.checkpoint.verify
    return bring_newest(
        config.checkpoint.remote, root, launch=launch, verify=verify, say=_tell, progress=progress
    ).verified


def bring_initial_weights(config: Config, fresh: bool) -> None:
    """Downloads `init_from` when it is in a store and will be read, for the same reason before the process group exists: no
    rank waits for another longer than a collective may. Raises CheckpointError."""
    if config.init_from is None or not is_remote(config.init_from.path):
        return
    if fresh or not folders(Path(config.run_dir) / "checkpoints"):
        find(config.init_from.path)


def refuse_used_remote(config: Config) -> None:
    """For a run that starts anew. Raises CheckpointError when `checkpoint.remote` has the checkpoints of another one."""
    if config.checkpoint.remote is not None:
        from llmtrain.checkpoint.remote.fetch import refuse_used

        refuse_used(config.checkpoint.remote)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def refuse_another_meaning(config: Config, folder: Path, manifest: Manifest) -> None:
    """A run is continued only by a config that means the same; what may differ is marked `free` in the schema.

    Raises CheckpointError with every difference. Data whose index is not on this machine yet is not compared.
    """
    changed = differences(manifest.config, config)
    try:
        if manifest.data.get("fingerprint") != data_fingerprint(config.data):
            changed.append("data: the shards are not those the run was started on")
    except ShardError:
        pass  # to be made or downloaded first; train() asks again after that
    if changed:
        raise CheckpointError(
            f"{folder} was written by a run that means something else:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nRestore these settings to continue it, choose another name or run_dir, or start anew with --fresh"
        )
