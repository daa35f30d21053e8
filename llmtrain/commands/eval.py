"""`llmtrain eval` (in this process, or in one process per GPU) and `llmtrain decontaminate`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.commands.arguments import output_path
from llmtrain.commands.processes import chosen_processes, joins_a_launcher
from llmtrain.errors import UserError, print_error
from llmtrain.logs import log

if TYPE_CHECKING:
    from llmtrain.eval.report.results import Report


def _shots(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected whole numbers, such as 5 or 0,5, found {text!r}") from None


def _tasks(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names or paths, such as arc_easy,my/task.yaml, found {text!r}")
    return names


_FLAGS = {
    "tasks": ("A,B", _tasks, "names or paths of tasks, in place of the file's tasks and gauntlet"),
    "data_dir": ("DIR", str, "a folder of local JSONL files, in place of the tasks' sources"),
    "out": ("DIR", str, "the folder of results; default results/NAME"),
    "shots": ("N,…", _shots, "few-shot examples of all tasks, in place of their own: 5, or 0,5 for both"),
    "limit": ("N", int, "only the first N documents of each task"),
    "weights": ("FORMAT", str, "int8 or float8: of linear layers' weights; default: the dtype of activations"),
    "max_length": ("N", int, "most tokens a model may read"),
    "max_batch_tokens": ("N", int, "tokens read at a time, padding included"),
}
"""Settings of the YAML that are also command-line options."""

_FOLDERS = {
    "lm_eval_folders": ("DIR", "a folder of lm-evaluation-harness's task files; may be repeated"),
    "allow_code": ("DIR", "a folder whose Python files those tasks may run; may be repeated"),
}
"""Lists of folders, of which an option gives one."""


def add_eval(commands) -> None:
    sub = commands.add_parser(
        "eval",
        help="score models on in-context-learning tasks",
        description="Scores models on the tasks of a YAML, such as quick, on every GPU of this machine (without "
        "one, on the CPU). Interrupted, the same command continues; repeated, it only writes the results anew.",
        epilog="Tasks of lm-evaluation-harness run as they are: --tasks lm_eval:NAME or the path of a task file, with "
        "pip install 'llmtrain[lm-eval]'.",
    )
    add_eval_arguments(sub)
    sub.add_argument("--nproc", type=int, metavar="N", help="processes (default: one per GPU, or one)")
    sub.set_defaults(func=run_eval)


def add_decontaminate(commands) -> None:
    sub = commands.add_parser(
        "decontaminate",
        help="look for the tasks' documents in training data",
        description="Looks for n-grams of the documents of a YAML's tasks, such as quick, in MDS shards or text. "
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
    sub.add_argument("--out", type=output_path, metavar="DIR", help="the folder of results; default results/NAME")
    sub.set_defaults(func=run_decontaminate)


def run_decontaminate(args: argparse.Namespace) -> int:
    from llmtrain.eval.decontamination.run import run  # imports numpy, which --help does not need

    return run(args)


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `llmtrain eval` and scripts/eval.py share."""
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="the YAML, or the name of one that llmtrain brings: quick; not needed with --tasks",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="a.b=c",
        help="settings that replace the file's; model=PATH: the model to score",
    )
    for name, (metavar, kind, help) in _FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)

    for name, (metavar, help) in _FOLDERS.items():
        parser.add_argument(
            f"--{name.removesuffix('s').replace('_', '-')}", dest=name, action="append", metavar=metavar, help=help
        )


def file_and_overrides(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """(the YAML, or None where tasks are named on the command line alone; settings that replace its own)."""
    import json

    file, overrides = args.file, list(args.overrides)
    if file is not None and "=" in file and not os.path.exists(file):
        file, overrides = None, [file, *overrides]
    if args.tasks is not None:
        overrides.insert(0, "gauntlet=null")
    flags = {name: value for name in (*_FLAGS, *_FOLDERS) if (value := getattr(args, name)) is not None}
    return file, [*overrides, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in flags.items())]


def run_eval(args: argparse.Namespace) -> int:
    if args.file == "import-task":
        raise UserError(
            "eval import-task is no more: a task of lm-evaluation-harness runs as it is, also in a gauntlet, by "
            f"--tasks {(args.overrides or ['FILE'])[0]} (a file's path, or lm_eval:NAME)"
        )
    from llmtrain.eval.run_config import load_eval_run

    file, overrides = file_and_overrides(args)
    if joins_a_launcher(args.nproc):
        return _run_rank(file, overrides)
    run = load_eval_run(file, overrides)
    processes = chosen_processes(args.nproc)
    if processes == 1:
        return _run(file, overrides)
    from llmtrain.distributed.launch import launch

    command = [sys.executable, "-P", "-m", "llmtrain.cli", "eval", *([] if file is None else [file]), *overrides]
    return launch(command, processes, run.out)


def _run(file: str | None, overrides: list[str]) -> int:
    from llmtrain.distributed.world import world_from_environment
    from llmtrain.eval.failures import failed_tasks
    from llmtrain.eval.report.results import Report, write_results
    from llmtrain.eval.run_config import load_eval_run
    from llmtrain.eval.runner import Done, evaluate

    run = load_eval_run(file, overrides)
    settings, done = run.model_dump(mode="json"), Done()
    try:
        report = evaluate(run, done)
    except (ValueError, KeyboardInterrupt):
        if done.results and world_from_environment().is_main:
            part = Report(run.name, done.results, groups=done.groups, failures=done.failures)
            _keep_earlier(run.out, part, settings)
            write_results(part, Path(run.out), settings=settings)
            log.info(f"{run.out} has what was done: {len(done.results)} results")
        raise
    if world_from_environment().is_main:
        _keep_earlier(run.out, report, settings)
        written = write_results(report, Path(run.out), settings=settings)
        if run.wandb is not None:
            from llmtrain.eval.report.tracking import log_to_wandb

            log_to_wandb(report, run.wandb, Path(run.out), settings)
        print((Path(run.out) / "results.md").read_text(encoding="utf-8"))
        print(f"written: {', '.join(str(path) for path in written)}", flush=True)
    if report.failures:
        raise failed_tasks(report.failures)
    return 0


def _keep_earlier(out: str, report: Report, settings: dict[str, Any]) -> None:
    from llmtrain.eval.report.results import set_aside

    if kept := set_aside(Path(out), report, settings):
        log.info(f"{out} had the results of another evaluation, which are now in {kept}")


def _run_rank(file: str | None, overrides: list[str]) -> int:
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
