"""Whether a config may continue a run. No torch here: asked before any process group."""

from __future__ import annotations

from pathlib import Path

from llmtrain.checkpoint.manifest import CheckpointError, Manifest, latest
from llmtrain.config.load import differences
from llmtrain.config.schema import Config
from llmtrain.data.shards import ShardError, data_fingerprint


def check_resumption(config: Config) -> None:
    """Raises CheckpointError if `config.run_dir` holds a run that this config must not continue."""
    found = latest(Path(config.run_dir) / "checkpoints", warn=lambda text: None)  # the run itself will name them
    if found:
        refuse_another_meaning(config, *found)


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
