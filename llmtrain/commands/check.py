"""`llmtrain check`. No torch here: it answers in under a second."""

from __future__ import annotations

import argparse
from collections import Counter

from llmtrain.schema.config import Config


def add_check(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("check", help="say everything that is wrong with a config, without running it")
    parser.add_argument("file", help="the YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace those of the file"
    )
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="check the batch and the sharding for N ranks (GPUs) too"
    )
    parser.set_defaults(func=check)


def check(args: argparse.Namespace) -> int:
    """Print one line for a good config. Raises ConfigError, whose text is the report, for any other."""
    from llmtrain.commands.checks import load_runnable

    config = load_runnable(args.file, args.overrides, world_size=args.nproc)
    print(f"{args.file}: OK, {summary(config, args.nproc)}")
    return 0


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
        accumulated = config.grad_accum(world_size)
        line += f"; on {world_size} ranks {accumulated} microbatches of {config.train.microbatch_size}"
    return line


def _length(config: Config) -> str:
    duration = config.train.duration
    if duration.unit == "epochs":
        return f"{duration}, in steps"
    steps = duration.steps(tokens_per_step=config.tokens_per_step, steps_per_epoch=None, total_steps=None)
    return f"{steps} steps"
