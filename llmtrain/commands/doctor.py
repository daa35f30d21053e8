"""`llmtrain doctor`. Declaring it imports no torch."""

import argparse

from llmtrain.config.shipped import CONFIG_HELP


def add_doctor(commands) -> None:
    sub = commands.add_parser(
        "doctor",
        help="this machine, its kernels, and whether they compute correctly",
        description="Says what this machine is, which backend can serve each operation and why the others cannot, and runs "
        "a small forward and backward of every backend against float64. Exit status 1 if one that `auto` would choose fails. "
        "With FILE instead: which backend each block of that model takes here, and on which measurement; exit status 1 if "
        "a backend that FILE names, or something else that it asks for, is not to be had here.",
    )
    sub.add_argument("file", nargs="?", metavar="FILE", help=CONFIG_HELP)
    sub.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the file's")
    sub.add_argument(
        "--dtype",
        metavar="NAME",
        help="bfloat16 (default on GPUs), float16 or float32 (default on CPUs; with FILE: as train.precision)",
    )
    sub.add_argument("--no-test", action="store_true", help="only say what can serve")
    sub.set_defaults(func=doctor)


def doctor(args: argparse.Namespace) -> int:
    if args.file is not None:
        from llmtrain.doctor.blocks import run as run_blocks
        from llmtrain.schema.load import load_config

        return run_blocks(load_config(args.file, args.overrides), args.dtype)
    from llmtrain.doctor.report import run

    return run(args)
