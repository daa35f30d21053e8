"""Reading of a run's YAML: a Config, or one report of everything that is wrong with the file. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.config.config_type import check_config_type
from llmtrain.config.decode import decode, problems_of_decoded
from llmtrain.config.interpolation import resolve
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.config.overrides import apply_override
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import read_file
from llmtrain.models.specs import backend_problems
from llmtrain.schema.config import Config
from llmtrain.schema.differences import differences

__all__ = ["ConfigError", "check_for_world", "differences", "load_config"]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    check_data: bool = False,
    fresh: bool = False,
) -> Config:
    """Read and check a config.

    overrides: `a.b=c`, applied in order; c is YAML and takes the place of what the file says.
    world_size: ranks of the run, where known; adds `check_for_world`.
    check_data: look at the data folders and the run's too, and at the weights of init_from where the run will read them.
    fresh: the run will not continue an earlier one in its folder.

    Raises ConfigError, which holds every problem and prints as the whole report.
    """
    source = read_file(path)
    check_config_type(source, "training")
    for override in overrides:
        apply_override(source, override, Config)
    resolve(source, Config)
    config, problems = decode(Config, source.data, source.unreadable)
    problems = [*source.problems, *problems]
    if config is not None:
        wrong = {problem.path for problem in problems}
        problems += problems_of_decoded(_backend_problems(config, wrong))
        if world_size is not None:
            problems += problems_of_decoded(check_for_world(config, world_size))
        if check_data and not any(path.startswith("data") for path in wrong):
            problems += problems_of_decoded(_data_problems(config))
        if check_data:
            problems += problems_of_decoded(_folder_problems(config))
        if check_data and not any(path.startswith("eval") for path in wrong):
            problems += problems_of_decoded(_icl_problems(config))
        if check_data and not any(path.startswith(("model", "init_from", "run_dir", "name")) for path in wrong):
            problems += problems_of_decoded(_initial_problems(config, fresh))
    if problems or config is None:
        raise ConfigError(source.title, problems, source.origins)
    return config


def check_for_world(config: Config, world_size: int) -> Iterator[Problem]:
    """Problems that keep a config from running on so many ranks (data-parallel processes, one per GPU)."""
    if world_size < 1:
        yield Problem("", None, f"cannot run on {world_size} ranks")
        return
    train = config.train
    unit = world_size * train.microbatch_size
    if train.global_batch_size % unit:
        below = train.global_batch_size // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        yield Problem(
            "train.global_batch_size",
            train.global_batch_size,
            f"must be a multiple of {unit} ({world_size} ranks x microbatch_size {train.microbatch_size}); use {near}",
        )
    size = train.sharding.shard_size
    if size is not None and world_size % size:
        yield Problem("train.sharding.shard_size", size, f"must divide the number of ranks ({world_size})")


def _backend_problems(config: Config, wrong: set[str]) -> Iterator[Problem]:
    """Named backends that no machine could use for their block or norm. Blocks with other problems are left out."""
    sound = {
        name: block
        for name, block in config.model.blocks.items()
        if not any(path.startswith(f"model.blocks.{name}.") for path in wrong)
    }
    model = config.model.model_copy(update={"blocks": sound})
    for problem in backend_problems(model, documents=config.data.mask_documents):
        yield Problem(f"model.{problem.path}", problem.found, problem.message)


def _data_problems(config: Config) -> Iterator[Problem]:
    from llmtrain.data.documents import check_documents
    from llmtrain.data.shards import check_streams, check_vocabulary

    problems = [*check_streams(config.data, config.train.global_batch_size)]
    problems += check_vocabulary(config.data, config.model.vocab_size)
    yield from problems or check_documents(config.data)


def _folder_problems(config: Config) -> Iterator[Problem]:
    """Problems that keep a run from writing to its folder."""
    if reason := unwritable_reason(config.run_dir):
        yield Problem("run_dir", config.run_dir, reason)


def _initial_problems(config: Config, fresh: bool) -> Iterator[Problem]:
    from llmtrain.checkpoint.initial import initial_problems

    yield from initial_problems(config, fresh)


def _icl_problems(config: Config) -> Iterator[Problem]:
    """Problems of the eval YAML of eval.icl, as its own report."""
    if config.eval.icl is None:
        return
    from llmtrain.eval.run_config import load_eval_run

    try:
        load_eval_run(config.eval.icl.file, needs_models=False)
    except ValueError as error:
        yield Problem("eval.icl.file", None, str(error))
