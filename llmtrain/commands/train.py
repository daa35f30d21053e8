"""`llmtrain train`: on this process, or on one process per GPU."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.commands.arguments import add_config
from llmtrain.commands.processes import chosen_processes, count_gpus, joins_a_launcher, probable_processes
from llmtrain.distributed.processes import saving_signals
from llmtrain.errors import UserError
from llmtrain.logs import log

if TYPE_CHECKING:
    from llmtrain.distributed.early_ranks import EarlyRanks
    from llmtrain.distributed.run_lock import RunLock
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
    sub.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again from the newest checkpoint after a failure, on the GPUs that are left, at most N times (default 0)",
    )
    sub.set_defaults(func=run_train)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `llmtrain train` and scripts/train.py share."""
    add_config(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="start anew; earlier checkpoints and logs of the run are moved aside"
    )


def run_train(args: argparse.Namespace) -> int:
    from llmtrain.train.faults.early_sigterm import ended_by_sigterm

    with ended_by_sigterm():
        return _run_train(args)


def _run_train(args: argparse.Namespace) -> int:
    from llmtrain.distributed.early_ranks import EarlyRanks

    if args.max_restarts < 0:
        raise UserError(f"--max-restarts {args.max_restarts}: expected 0 or more")
    if not joins_a_launcher(args.nproc):
        command = [sys.executable, "-P", "-m", "llmtrain.cli", "train", args.file, *args.overrides]
        with EarlyRanks(command, probable_processes(args.nproc)) as early:
            return _begin(args, early)
    if args.max_restarts:
        raise UserError(
            "--max-restarts starts processes again, but a launcher started this one: use the launcher's own"
        )
    _await_launcher()
    from llmtrain.train.worker import run_rank

    return run_rank(_loader(args), args.file, args.overrides, args.fresh, None, _preflight)


def _await_launcher() -> None:
    """Import PyTorch in a rank that was started before its launcher knew the run, until it does."""
    from llmtrain.distributed.early_ranks import await_admission, waits
    from llmtrain.start import import_phase, start_phase

    if waits():
        with import_phase("import of PyTorch"), contextlib.suppress(Exception):  # which comes again at its place
            importlib.import_module("torch")
        with start_phase("wait for the launcher, which reads the config"):
            await_admission()


def _loader(args: argparse.Namespace) -> Callable[[int | None], Config]:
    from llmtrain.commands.checks import load_runnable

    return lambda ranks: load_runnable(args.file, args.overrides, world_size=ranks, fresh=args.fresh)


def _begin(args: argparse.Namespace, early: EarlyRanks) -> int:
    """Train on this process, or on several that it starts."""
    from llmtrain.distributed.run_lock import RunLock
    from llmtrain.distributed.world import require_loopback
    from llmtrain.train.resume import check_resumption
    from llmtrain.train.worker import run_rank

    load = _loader(args)
    config = load(args.nproc)
    require_loopback()
    with RunLock(config.run_dir) as lock:
        if not args.fresh:
            check_resumption(config)
        processes = chosen_processes(args.nproc)
        if processes > 1 or args.max_restarts:
            return _launched(args, load, processes, lock, early)
        early.end()
        return run_rank(load, args.file, args.overrides, args.fresh, lock)


def _preflight(setting: str, folder: Path) -> None:
    if setting == "on":
        from llmtrain.doctor.cluster import before_run

        before_run(folder)


def _launched(
    args: argparse.Namespace, load: Callable[[int], Config], processes: int, lock: RunLock, early: EarlyRanks
) -> int:
    """Train on so many processes of this machine, which start again after a failure as --max-restarts allows."""
    from llmtrain.checkpoint.local import folders
    from llmtrain.distributed.launch import launch
    from llmtrain.train.compile_ahead import begin_compiling
    from llmtrain.train.resume import refuse_used_remote
    from llmtrain.train.worker import move_aside

    config = load(processes)
    begin_compiling(config, processes, processes)
    if args.fresh:
        refuse_used_remote(config)
        move_aside(lock)

    def start(ranks: int, attempt: int) -> int:
        if len(early.waiting) != ranks:
            early.end()
        return launch(early.command, ranks, config.run_dir, config.checkpoint.grace_seconds, lock, attempt, early)

    places = count_gpus if args.max_restarts and count_gpus() else None
    root = Path(config.run_dir) / "checkpoints"
    return run_with_restarts(
        start, processes, args.max_restarts, load, places, lambda: bool(config.checkpoint.remote or folders(root))
    )


_FINAL = (0, UserError.status, *(128 + number for number in saving_signals()))
"""Exit statuses that another start would not change: success, a wrong input, and those of signals by which a run saves and ends."""


def run_with_restarts(
    start: Callable[[int, int], int],
    processes: int,
    most: int,
    check: Callable[[int], object],
    available: Callable[[], int] | None = None,
    saved: Callable[[], bool] = lambda: True,
) -> int:
    """Start the ranks, and again after a failure, at most `most` times. Returns the last exit status.

    start: runs so many ranks as the attempt of this number, from 0, and returns their exit status. check: raises UserError where
    a run of so many ranks cannot be. available: the number of ranks for which there is a place after a failure; default: as
    many as before. saved: False where the run has no checkpoint to start from.
    """
    attempt = 0
    while True:
        status = start(processes, attempt)
        if status in _FINAL or not most:
            return status
        if attempt == most:
            log.error(f"status {status}: no restart of {most} is left")
            return status
        places = min(processes, available()) if available else processes
        left, reason = places, ""
        while left:
            try:
                check(left)
                break
            except UserError as error:
                left, reason = left - 1, reason or f"no number of ranks up to {places} can run it:\n{error}"
        else:
            log.error(f"no restart: {reason or f'no GPU of {processes} is left'}")
            return status
        attempt += 1
        fewer = f", {left} instead of {processes}" if left != processes else ""
        where = "from the newest checkpoint" if saved() else "from the beginning, as no checkpoint was saved"
        log.warning(f"status {status}: the ranks start again{fewer}, {where} ({attempt} of {most})")
        processes = left
