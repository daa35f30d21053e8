"""`llmtrain doctor`. Declaring it imports no torch."""

from __future__ import annotations

import argparse


def add_doctor(commands) -> None:
    sub = commands.add_parser(
        "doctor",
        help="this machine, its kernels, and whether they compute correctly",
        description="Says what this machine is, which backend can serve each operation and why the others cannot, and runs "
        "a small forward and backward of every backend against float64. Exit status 1 if one that `auto` would choose fails.",
    )
    sub.add_argument("--dtype", metavar="NAME", help="bfloat16 (default on GPUs), float16 or float32 (default on CPUs)")
    sub.add_argument("--no-test", action="store_true", help="only say what can serve")
    sub.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    from llmtrain.doctor.report import run

    return run(args)
