"""`llmtrain doctor`. Declaring it imports no torch."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from llmtrain.commands.arguments import add_config
from llmtrain.commands.processes import chosen_processes, joins_a_launcher
from llmtrain.errors import UserError


def add_doctor(commands) -> None:
    sub = commands.add_parser(
        "doctor",
        help="this machine, its kernels, and whether they compute correctly",
        description="Says what this machine is, which backend can serve each operation and why the others cannot, and runs "
        "a small forward and backward of every backend against float64. Exit status 1 if one that `auto` would choose fails. "
        "With FILE instead: which backend each block of that model takes here, and on which measurement; exit status 1 if "
        "a backend that FILE names, or something else that it asks for, is not to be had here. "
        "With --cluster: every node and GPU of a job, under torchrun or srun, or of this machine.",
    )
    add_config(sub, optional=True)
    sub.add_argument(
        "--dtype",
        metavar="NAME",
        help="bfloat16 (default on GPUs), float16 or float32 (default on CPUs; with FILE: as train.precision)",
    )
    sub.add_argument(
        "--cluster",
        action="store_true",
        help="measure nodes, GPUs and what is between them; with FILE, its run_dir must be one folder for all. Exit status 1, "
        "and a list for SLURM's --exclude, if something is wrong",
    )
    sub.add_argument("--nproc", type=int, metavar="N", help="with --cluster alone: processes (default: one per GPU)")
    sub.add_argument("--no-test", action="store_true", help="only say what can serve")
    sub.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    if args.cluster:
        return _cluster(args)
    if args.nproc is not None:
        raise UserError("--nproc is for --cluster")
    if args.file is not None:
        from llmtrain.doctor.blocks import run as run_blocks
        from llmtrain.schema.load import load_config

        return run_blocks(load_config(args.file, args.overrides), args.dtype)
    from llmtrain.doctor.report import run

    return run(args)


def _cluster(args: argparse.Namespace) -> int:
    from llmtrain.doctor.cluster import adopt_srun, run
    from llmtrain.schema.load import load_config

    adopt_srun(os.environ)
    folder = Path(load_config(args.file, args.overrides).run_dir) if args.file else None
    if not joins_a_launcher(args.nproc) and (processes := chosen_processes(args.nproc)) > 1:
        from llmtrain.distributed.launch import launch

        asked = [args.file, *args.overrides] if args.file else []
        with tempfile.TemporaryDirectory() as logs:
            return launch([sys.executable, "-P", "-m", "llmtrain.cli", "doctor", "--cluster", *asked], processes, logs)
    return run(folder)
