"""The checkpoint that a run takes its first weights from (`init_from`), compared with its model. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.repository import Repository, silent
from llmtrain.config.addresses import is_remote
from llmtrain.config.base import Problem
from llmtrain.schema.config import Config
from llmtrain.schema.differences import ABSENT, changes, text

# Settings of training, or of weights drawn at random: another value of these still takes the same weights.
_MAY_DIFFER = re.compile(r"model\.(dropout|init\..*|blocks\.[^.]+\.(dt_min|dt_max|a_init_range))")


def initial_checkpoint(config: Config) -> tuple[Path, Manifest]:
    """The checkpoint that `config.init_from` names. Raises CheckpointError when it is gone, or of another model."""
    assert config.init_from is not None
    folder, manifest = Repository(config.init_from.path).open()
    mismatches = list(_mismatches(config, manifest))
    if mismatches:
        lines = "\n".join(f"  {problem.path}: {problem.message}" for problem in mismatches)
        raise CheckpointError(f"init_from: {folder} holds another model\n{lines}")
    return folder, manifest


def initial_problems(config: Config, fresh: bool) -> Iterator[Problem]:
    """Reasons why `init_from` cannot be used; none once the run has a checkpoint of its own and will continue it."""
    if config.init_from is None:
        return
    path, run_dir = config.init_from.path, Path(config.run_dir)
    if not fresh and Repository(run_dir / "checkpoints").newest(silent):
        return
    if not is_remote(path) and Path(path).expanduser().resolve().is_relative_to(run_dir.resolve()):
        yield Problem("init_from", path, "is the folder of this run; choose another name or run_dir")
        return
    try:
        manifest = Repository(path).find().require()
    except CheckpointError as error:
        yield Problem("init_from", path, str(error))
        return
    yield from _mismatches(config, manifest)


def _mismatches(config: Config, manifest: Manifest) -> Iterator[Problem]:
    """Every setting in which the checkpoint's model differs. Where only a part is taken, tensors are compared as they are
    loaded (checkpoint/partial_load.py)."""
    assert config.init_from is not None
    if not config.init_from.is_whole:
        return
    for change in changes(manifest.config["model"], config.model, "model."):
        if _MAY_DIFFER.fullmatch(change.path):
            continue
        if change.path == "model.max_seq_len" and config.model.positions == "none":
            continue  # no parameter has this length
        found = None if change.new is ABSENT else change.new
        wanted = "is not in" if change.old is ABSENT else f"must be {text(change.old)}, as in"
        yield Problem(change.path, found, f"{wanted} the checkpoint of init_from ({config.init_from.path})")
