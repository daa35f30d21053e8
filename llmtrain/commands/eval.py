"""`llmtrain eval` (in this process, or in one process per GPU) and `llmtrain decontaminate`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError, print_error
from llmtrain.logs import log

_FLAGS = {
    "data_dir": ("DIR", str, "a folder of local JSONL files, in place of the tasks' sources"),
    "out": ("DIR", str, "the folder of results; default results/NAME"),
    "limit": ("N", int, "only the first N documents of each task"),
    "max_length": ("N", int, "most tokens a model may read"),
    "max_batch_tokens": ("N", int, "tokens read at a time, padding included"),
}
"""Settings of the YAML that are also command-line options."""


def add_eval(commands) -> None:
    sub = commands.add_parser(
        "eval",
        help="score models on in-context-learning tasks",
        description="Scores models on the tasks of a YAML, such as eval/quick.yaml, on every GPU of this machine (without "
        "one, on the CPU). Interrupted, the same command continues; repeated, it only writes the results anew.",
    )
    add_eval_arguments(sub)
    sub.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per GPU, or one)")
    sub.set_defaults(func=run_eval)


def add_decontaminate(commands) -> None:
    sub = commands.add_parser(
        "decontaminate",
        help="look for the tasks' documents in training data",
        description="Looks for n-grams of the documents of a YAML's tasks, such as eval/quick.yaml, in MDS shards or text. "
        "A document is hit if one of its n-grams occurs anywhere. Prints a table per task; writes overlap.json and .md.",
    )
    sub.add_argument("file", metavar="FILE", help="the YAML that names tasks or a gauntlet, as for `llmtrain eval`")
    sub.add_argument(
        "data",
        nargs="+",
        type=Path,
        metavar="DATA",
        help="what `llmtrain prepare` wrote, a folder of MDS shards, or text files and JSONL",
    )
    sub.add_argument("--tokenizer", metavar="NAME", help="of the shards; default: the one beside them")
    sub.add_argument("--data-dir", metavar="DIR", help="a folder of local JSONL files, in place of the tasks' sources")
    sub.add_argument("--n", type=int, default=13, metavar="N", help="tokens of an n-gram (default 13)")
    sub.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    sub.add_argument("--text-key", default="text", metavar="KEY", help="field of a JSONL record (default text)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="the folder of results; default results/NAME")
    sub.set_defaults(func=run_decontaminate)


def run_decontaminate(args: argparse.Namespace) -> int:
    from llmtrain.eval.decontamination.run import run  # imports numpy, which --help does not need

    return run(args)


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `llmtrain eval` and scripts/eval.py share."""
    parser.add_argument("file", metavar="FILE", help="the YAML")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b=c",
        help="settings that replace the file's; model=PATH: the model to score",
    )
    for name, (metavar, kind, help) in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)
    parser.add_argument(
        "--details", action="store_true", help="also write every document's log-likelihoods and answers"
    )


def overrides_of(args: argparse.Namespace) -> list[str]:
    import json

    given = [f"{name}={json.dumps(getattr(args, name))}" for name in _FLAGS if getattr(args, name) is not None]
    return [*args.overrides, *given, *(["details=true"] if args.details else [])]


def run_eval(args: argparse.Namespace) -> int:
    from llmtrain.distributed.world import launched_by_a_launcher
    from llmtrain.eval.run_config import load_eval_run

    overrides = overrides_of(args)
    if launched_by_a_launcher():
        if args.nproc is not None:
            raise UserError(
                "--nproc starts processes, but a launcher already started this one; drop --nproc or the launcher"
            )
        return _run_rank(args.file, overrides)
    run = load_eval_run(args.file, overrides)
    processes = args.nproc if args.nproc is not None else _gpus() or 1
    if processes < 1:
        raise UserError(f"--nproc {processes}: expected at least 1")
    if processes == 1:
        return _run(args.file, overrides)
    from llmtrain.distributed.launch import launch

    return launch([sys.executable, "-m", "llmtrain.cli", "eval", args.file, *overrides], processes, run.out)


def _run(file: str, overrides: list[str]) -> int:
    from llmtrain.distributed.world import world_from_environment
    from llmtrain.eval.report.results import Report, write_results
    from llmtrain.eval.run_config import load_eval_run
    from llmtrain.eval.runner import evaluate

    run = load_eval_run(file, overrides)
    settings, done = run.model_dump(mode="json"), []
    try:
        report = evaluate(run, done)
    except (ValueError, KeyboardInterrupt):
        if done and world_from_environment().is_main:
            write_results(Report(run.name, done), Path(run.out), settings=settings, details=run.details)
            log.info(f"{run.out} has what was done: {len(done)} results")
        raise
    if world_from_environment().is_main:
        written = write_results(report, Path(run.out), settings=settings, details=run.details)
        if run.wandb is not None:
            from llmtrain.eval.report.tracking import log_to_wandb

            log_to_wandb(report, run.wandb, Path(run.out), settings)
        print((Path(run.out) / "results.md").read_text(encoding="utf-8"))
        print(f"written: {', '.join(str(path) for path in written[:4])}", flush=True)
    return 0


def _run_rank(file: str, overrides: list[str]) -> int:
    """Run one rank of several. Returns the exit status, or ends the rank."""
    from llmtrain.distributed.world import exit_status_of_rank

    def run() -> int:
        status = _run(file, overrides)
        _leave_group()
        return status

    def report(error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        if os.environ["RANK"] != "0":
            time.sleep(3.0)  # most errors are raised by every rank; rank 0, which has the terminal, is to be the first
        print_error(error)

    return exit_status_of_rank(run, report)


def _leave_group() -> Any:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
