"""Checks and downloads before a run starts or continues. No torch here: there is no process group yet."""

import os
from collections.abc import Iterator
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.local import LocalCheckpoint, folders
from llmtrain.checkpoint.repository import Repository, silent
from llmtrain.config.addresses import is_remote
from llmtrain.config.checksums import checksum
from llmtrain.config.regular_file import read_bytes
from llmtrain.data.loader.mixture import allowed_change, unchanged_steps
from llmtrain.data.shards.checks import data_fingerprint, stream_samples
from llmtrain.data.shards.index import ShardError
from llmtrain.data.tokenize import stored_tokenizer
from llmtrain.distributed.processes import LAUNCHER
from llmtrain.logs import log
from llmtrain.schema.config import Config
from llmtrain.schema.differences import differences


def check_resumption(config: Config) -> None:
    """Raise CheckpointError if `config.run_dir` holds a run that this config must not continue."""
    found = Repository(Path(config.run_dir) / "checkpoints").newest(silent)  # the run itself will warn
    if found:
        require_same_run(continued(config, found), found)


def continued(config: Config, checkpoint: Checkpoint) -> Config:
    """The config to continue a run with, in the order of samples that it began with where none is named."""
    data = config.data.in_order_of(checkpoint.require().data.get("position", {}))
    return config.model_copy(update={"data": data})


def restarts_in_place() -> bool:
    """True in a rank that our launcher starts again after a failure."""
    return LAUNCHER in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def download_newest_checkpoint(config: Config, launch: str | None, progress: bool) -> str | None:
    """Download the newest checkpoint of `checkpoint.remote` if it is newer than the newest good one here. Every rank calls
    this. launch: see fetch.fetch_newest. Returns the save_id of the newest checkpoint here if its hashes were verified on
    the way. Raises CheckpointError."""
    if config.checkpoint.remote is None:
        return None
    from llmtrain.checkpoint.fetch import fetch_newest

    root, verify = Path(config.run_dir) / "checkpoints", config.checkpoint.verify
    return fetch_newest(
        config.checkpoint.remote,
        root,
        launch=launch,
        verify=verify,
        notify=log.info,
        progress=progress,
        in_place=restarts_in_place(),
    ).verified


def download_initial_weights(config: Config, fresh: bool) -> None:
    """Download `init_from` if it is in a store and will be read: now, because a download may take longer than the time limit
    of a collective. Raises CheckpointError."""
    if config.init_from is None or not is_remote(config.init_from.path):
        return
    if fresh or not folders(Path(config.run_dir) / "checkpoints"):
        Repository(config.init_from.path).open()


def refuse_used_remote(config: Config) -> None:
    """Raise CheckpointError if `checkpoint.remote` holds the checkpoints of another run than the one that starts anew."""
    if config.checkpoint.remote is not None:
        from llmtrain.checkpoint.fetch import refuse_used

        refuse_used(config.checkpoint.remote)


def require_same_run(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, with every difference, if a config means something else than the one that wrote a checkpoint.

    Settings that may differ are marked `free` in the schema; of data.mixture, what comes later may. Data whose index is not on this
    machine yet is not compared.
    """
    manifest = checkpoint.require()
    changed = _without_later_phases(differences(manifest.config, config), config, checkpoint)
    began = manifest.data.get("position", {}).get("order", "streaming")
    if began == "seekable" and config.data.order_name == "mixed":
        changed.append("data.order: mixtures were ordered otherwise in the version of llmtrain that began this run")
    elif began != config.data.order_name:
        changed.append(f"data.order: {began} -> {config.data.order_name}")
    changed += other_tokenizers(config, checkpoint, "the run was started")
    try:
        if manifest.data.get("fingerprint") != data_fingerprint(config.data):
            changed.append("data: the shards are not those the run was started on")
    except ShardError:
        pass  # to be made or downloaded first; train() compares again after that
    if changed:
        raise CheckpointError(
            f"{checkpoint.address} was written by a run that means something else:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nRestore these settings to continue it, choose another name or run_dir, or start anew with --fresh"
        )


def tokenizer_files(config: Config, resumed: LocalCheckpoint | None) -> dict[str, bytes]:
    """The run's tokenizer as a file of its checkpoints: that of the checkpoint it goes on from, else the one beside its shards;
    none where there is neither. Raises TokenizerError for one that cannot be read."""
    if resumed is not None and stored_tokenizer.NAME in resumed.require().files:
        return {stored_tokenizer.NAME: read_bytes(resumed.folder / stored_tokenizer.NAME)}
    found = stored_tokenizer.run_tokenizers(config.data.model_dump(mode="json"))
    return {stored_tokenizer.NAME: stored_tokenizer.pack(found[0])} if found else {}


def other_tokenizers(config: Config, checkpoint: Checkpoint, what: str) -> Iterator[str]:
    """Differences between the tokenizer of a checkpoint, with which `what`, and those beside the shards."""
    if not isinstance(checkpoint, LocalCheckpoint) or stored_tokenizer.NAME not in checkpoint.require().files:
        return
    file = checkpoint.folder / stored_tokenizer.NAME
    content = read_bytes(file)
    for folder in stored_tokenizer.run_tokenizers(config.data.model_dump(mode="json")):
        if not stored_tokenizer.same_tokens(content, file, folder):
            began, now = checksum(content)[:16], checksum(stored_tokenizer.pack(folder))[:16]
            yield (
                f"data: {folder} is another tokenizer ({now}) than the one that {what} with ({file}, {began}): "
                "prepare the data with that one again, or name the folder that it was in"
            )


def _without_later_phases(changed: list[str], config: Config, checkpoint: Checkpoint) -> list[str]:
    """The differences without those of data.mixture where what was read so far stays the same, and else why it does not."""
    before = checkpoint.require().config["data"].get("mixture")
    others = [line for line in changed if not line.startswith("data.mixture")]
    if others == changed or not before or config.data.mixture is None:
        return changed
    if (samples := stream_samples(config.data)) is None:
        return others  # indexes to be made or downloaded first; train() compares again after that
    batch = config.samples_per_step
    same = unchanged_steps(before, config.data, batch, samples)
    read = checkpoint.step + sum(count for _, count in checkpoint.require().data.get("passed_over", []))
    if same is None or read <= same:
        return others
    return [
        *others,
        f"data.mixture: other samples would have been read from step {same + 1:,} on, and the run is at step {read:,}. "
        f"{allowed_change(before, config.data, batch, samples, read)}. For other data from here on, start a new run from the "
        "weights with init_from",
    ]
