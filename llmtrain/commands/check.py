"""`llmtrain check`. No torch here: it answers in under a second."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from llmtrain.commands.arguments import add_config
from llmtrain.errors import first_few

if TYPE_CHECKING:
    from llmtrain.schema.config import Config


def add_check(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "check",
        help="say everything that is wrong with a config, without running it",
        description="Says everything that is wrong with the YAML of a run or of an evaluation, each with its key, what was found "
        "and what is allowed. Exit status 2 when anything is.",
    )
    add_config(parser)
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="check the batch and the sharding for N ranks (GPUs) too"
    )
    parser.set_defaults(func=check)


def check(args: argparse.Namespace) -> int:
    """Print one line for a good config. Raises ConfigError, whose text is the report, for any other."""
    from llmtrain.commands.checks import load_runnable
    from llmtrain.config.shipped import config_title

    if _is_evaluation(args.file):
        print(f"{config_title(args.file)}: OK, {_tasks(args.file, args.overrides)}")
        return 0
    config = load_runnable(args.file, args.overrides, world_size=args.nproc)
    print(f"{config_title(args.file)}: OK, {summary(config, args.nproc)}")
    return 0


def _is_evaluation(file: str) -> bool:
    from llmtrain.config.config_type import is_evaluation
    from llmtrain.config.report import ConfigError
    from llmtrain.config.shipped import find_config
    from llmtrain.config.yaml_source import read_file

    try:
        return is_evaluation(read_file(find_config(file)).data)
    except ConfigError:  # which is said by whoever loads it
        return False


def _tasks(file: str, overrides: list[str]) -> str:
    """One line: `2 tasks: piqa (0-shot), arc_easy (0-shot)`. Raises ConfigError for an eval YAML that cannot be used."""
    from llmtrain.eval.report.gauntlet import load_gauntlet
    from llmtrain.eval.run_config import load_eval_run, task_runs

    run = load_eval_run(file, overrides, needs_models=False)
    titles = [one.title for one in task_runs(run, load_gauntlet(run.gauntlet) if run.gauntlet else None)]
    return f"{len(titles)} task{'s' * (len(titles) != 1)}: {first_few(titles, 5)}"


def summary(config: Config, world_size: int | None = None) -> str:
    """One line: `12 layers (10 mamba2, 2 mamba2 + shared_attention), d_model 256; 300 steps of 64 sequences ...`."""
    blocks = config.model.blocks
    kinds = Counter(
        blocks[layer.block].type + (f" + {blocks[layer.shared].type}" if layer.shared else "")
        for layer in config.model.layer_list()
    )
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    batch = f"{config.train.global_batch_size} sequences x {config.data.seq_len} tokens"
    line = f"{kinds.total()} layers ({layers}), d_model {config.model.d_model}; {_length(config)} of {batch}"
    if world_size is not None:
        accumulated, context = config.grad_accum(world_size), config.train.parallel.context
        shared = world_size // context
        groups = (
            "" if context == 1 else f" in {shared} group{'s' * (shared != 1)} that share{'s' * (shared == 1)} sequences"
        )
        line += f"; on {world_size} ranks{groups} "
        if config.train.microbatch_size == "auto":
            line += f"{accumulated} sequences a step, in microbatches that a GPU chooses"
        else:
            line += f"{accumulated} microbatches of {config.train.microbatch_size}"
    return line


def _length(config: Config) -> str:
    duration = config.train.duration
    if duration.unit == "epochs":
        return f"{duration}, in steps"
    steps = duration.steps(tokens_per_step=config.tokens_per_step, steps_per_epoch=None, total_steps=None)
    return "1 step" if steps == 1 else f"{steps} steps"
