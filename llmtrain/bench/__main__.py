"""`python -m llmtrain.bench tune | kernels | doctor`: as under `llmtrain`, without the libraries that training needs."""

from __future__ import annotations

import argparse

from llmtrain.commands.bench import add_benches
from llmtrain.commands.doctor import add_doctor
from llmtrain.errors import exit_with


def main() -> int:
    root = argparse.ArgumentParser(prog="python -m llmtrain.bench", description=__doc__)
    commands = root.add_subparsers(dest="bench", required=True, metavar="WHAT")
    add_benches(commands)
    add_doctor(commands)
    args = root.parse_args()
    return args.func(args)


if __name__ == "__main__":
    exit_with(main)
