"""A config checked against this machine: data folders, the run's folder, eval tasks, initial weights. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.checkpoint.initial_weights import initial_problems
from llmtrain.config.base import Problem
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.data.documents import check_documents
from llmtrain.data.shards import check_streams, check_vocabulary
from llmtrain.errors import UserError
from llmtrain.schema.config import Config
from llmtrain.schema.load import Check, load_config


def load_runnable(
    path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None, fresh: bool = False
) -> Config:
    """Read a config and check that it can run here. fresh: it will not continue an earlier run in its folder.

    Raises ConfigError, which holds every problem, those of `load_config` among them.
    """
    checks = (
        Check(_data_problems, reads=("data",)),
        Check(_folder_problems),
        Check(_in_context_problems, reads=("eval",)),
        Check(lambda config: initial_problems(config, fresh), reads=("model", "init_from", "run_dir", "name")),
    )
    return load_config(path, overrides, world_size=world_size, checks=checks)


def _data_problems(config: Config) -> Iterator[Problem]:
    problems = [*check_streams(config.data, config.train.global_batch_size)]
    problems += check_vocabulary(config.data, config.model.vocab_size)
    yield from problems or check_documents(config.data)


def _folder_problems(config: Config) -> Iterator[Problem]:
    if reason := unwritable_reason(config.run_dir):
        yield Problem("run_dir", config.run_dir, reason)


def _in_context_problems(config: Config) -> Iterator[Problem]:
    """Problems of the eval YAML that eval.icl names, in its own report."""
    if config.eval.icl is None:
        return
    from llmtrain.eval.run_config import load_eval_run

    try:
        load_eval_run(config.eval.icl.file, needs_models=False)
    except UserError as error:
        yield Problem("eval.icl.file", None, str(error))
