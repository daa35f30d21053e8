"""`python -m llmtrain.bench tune | kernels | doctor`: as under `llmtrain`, with PyTorch and Triton alone installed."""

from __future__ import annotations

import argparse
import sys

from llmtrain.bench.commands import add_benches
from llmtrain.doctor.commands import add_doctor


def main() -> int:
    root = argparse.ArgumentParser(prog="python -m llmtrain.bench", description=__doc__)
    commands = root.add_subparsers(dest="bench", required=True, metavar="WHAT")
    add_benches(commands)
    add_doctor(commands)
    args = root.parse_args()
    try:
        return args.func(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
