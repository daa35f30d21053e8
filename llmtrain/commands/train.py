"""`llmtrain train`: on this process, or on one process per GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.schema.config import Config


def add_train(commands) -> None:
    sub = commands.add_parser(
        "train",
        help="train a model from a YAML, or continue its run",
        description="Trains the model of a YAML on every GPU of this machine (without one, on the CPU). "
        "The same command again continues from the last complete checkpoint.",
    )
    add_run_arguments(sub)
    sub.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per GPU, or one)")
    sub.set_defaults(func=run_train)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `llmtrain train` and scripts/train.py share."""
    parser.add_argument("file", metavar="FILE", help="the YAML")
    # With a default, argparse does not ask for them when FILE is missing.
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the file's")
    parser.add_argument(
        "--fresh", action="store_true", help="start anew; earlier checkpoints and logs of the run are moved aside"
    )


def run_train(args: argparse.Namespace) -> int:
    from llmtrain.commands.checks import load_runnable
    from llmtrain.distributed.world import launched_by_a_launcher
    from llmtrain.train.resume import check_resumption, refuse_used_remote
    from llmtrain.train.worker import run_rank, set_aside

    def load(ranks: int | None) -> Config:
        return load_runnable(args.file, args.overrides, world_size=ranks, fresh=args.fresh)

    if launched_by_a_launcher():
        if args.nproc is not None:
            raise UserError(
                "--nproc starts processes, but a launcher already started this one; drop --nproc or the launcher"
            )
        return run_rank(load, args.file, args.overrides, args.fresh)

    config = load(args.nproc)
    if not args.fresh:
        check_resumption(config)
    processes = args.nproc or _gpus() or 1
    if processes < 1:
        raise UserError(f"--nproc {processes}: expected at least 1")
    if processes == 1:
        return run_rank(load, args.file, args.overrides, args.fresh)
    from llmtrain.distributed.launch import launch

    config = load(processes)
    if args.fresh:
        refuse_used_remote(config)
        set_aside(Path(config.run_dir))
    command = [sys.executable, "-m", "llmtrain.cli", "train", args.file, *args.overrides]
    return launch(command, processes, config.run_dir, config.checkpoint.grace_seconds)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
