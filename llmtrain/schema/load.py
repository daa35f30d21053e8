"""Reading of a run's YAML: a Config, or one report of everything that is wrong with the file. No torch here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.config.base import Problem
from llmtrain.config.config_type import check_config_type
from llmtrain.config.decode import decode, problems_of_decoded
from llmtrain.config.interpolation import resolve
from llmtrain.config.overrides import apply_override
from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import config_title, find_config
from llmtrain.config.yaml_source import read_file
from llmtrain.models.backends import backend_problems
from llmtrain.schema.config import Config
from llmtrain.schema.pipeline import microbatch_problems


@dataclass(frozen=True)
class Check:
    """A further rule on a whole config. reads: the sections it needs; it is left out when one of them is wrong already."""

    problems: Callable[[Config], Iterator[Problem]]
    reads: tuple[str, ...] = ()


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None, checks: Sequence[Check] = ()
) -> Config:
    """Read and check a config. path: also the name of a shipped one (`llmtrain.config.shipped`).

    overrides: `a.b=c`, applied in order; c is YAML and takes the place of the file's value.
    world_size: ranks of the run, where known; adds `check_for_world`.
    checks: rules on more than the text, such as those of `llmtrain.commands.checks`.

    Raises ConfigError, which holds every problem and prints as the whole report.
    """
    source = read_file(find_config(path))
    source.title = config_title(path)
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
        for check in checks:
            if not any(path.startswith(check.reads) for path in wrong):
                problems += problems_of_decoded(check.problems(config))
    if problems or config is None:
        raise ConfigError(source.title, problems, source.origins)
    return config


def check_for_world(config: Config, world_size: int) -> Iterator[Problem]:
    """Problems that keep a config from running on so many ranks (processes, one per GPU)."""
    if world_size < 1:
        yield Problem("", None, f"cannot run on {world_size} ranks")
        return
    train, parallel = config.train, config.train.parallel
    if world_size % parallel.ranks:
        given = [key for key in ("pipeline", "context", "tensor") if getattr(parallel, key) > 1]
        if len(given) == 1:
            yield Problem(
                f"train.parallel.{given[0]}", parallel.ranks, f"must divide the number of ranks ({world_size})"
            )
        else:
            text = f"share samples between {parallel.ranks} ranks, which must divide the number of ranks ({world_size})"
            yield Problem("train.parallel", parallel.describe(), text)
        return
    if world_size // parallel.pipeline % parallel.expert:
        of = "ranks" if parallel.pipeline == 1 else "ranks of a stage"
        text = f"must divide the number of {of} ({world_size // parallel.pipeline})"
        yield config.problem_at("train.parallel.expert", text)
    groups = world_size // parallel.ranks
    sharers = f"{world_size} ranks" if parallel.ranks == 1 else f"{groups} groups of {parallel.ranks} ranks"
    unit = groups * train.least_microbatch
    if train.global_batch_size % unit:
        yield config.problem_at(
            "train.global_batch_size",
            f"must be a multiple of {unit} ({sharers} x microbatch_size {train.least_microbatch}); {config.batch_remedy(groups)}",
        )
    elif config.samples_per_step % groups:
        each = config.objective.trained_per_sample
        text = f"makes {config.samples_per_step} groups of {each} sequences, which {sharers} cannot share; "
        text += f"use a multiple of {each * groups}"
        yield Problem("train.global_batch_size", train.global_batch_size, text)
    else:
        yield from microbatch_problems(train, groups)
    size, ranks = train.sharding.shard_size, world_size // parallel.pipeline
    if size is not None and ranks % size:
        of = f"ranks ({world_size})" if parallel.pipeline == 1 else f"ranks of a stage ({ranks})"
        yield Problem("train.sharding.shard_size", size, f"must divide the number of {of}")


def _backend_problems(config: Config, wrong: set[str]) -> Iterator[Problem]:
    """Named backends that no machine could use for their block or norm. Blocks with other problems are left out."""
    sound = {
        name: block
        for name, block in config.model.blocks.items()
        if not any(path.startswith(f"model.blocks.{name}.") for path in wrong)
    }
    model = config.model.model_copy(update={"blocks": sound})
    for problem in backend_problems(model, config.train.dtype, config.data.mask_documents):
        yield Problem(f"model.{problem.path}", problem.found, problem.message)
