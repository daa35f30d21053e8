"""The `llmtrain` command. Each subcommand is declared beside the code that it runs; none imports torch to parse."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from llmtrain import __version__
from llmtrain.commands.bench import add_bench
from llmtrain.commands.check import add_check
from llmtrain.commands.checkpoint import add_checkpoint
from llmtrain.commands.convert import add_export, add_import
from llmtrain.commands.describe import add_describe, add_mfu
from llmtrain.commands.doctor import add_doctor
from llmtrain.commands.eval import add_decontaminate, add_eval
from llmtrain.commands.generate import add_generate
from llmtrain.commands.prepare import add_prepare
from llmtrain.commands.schema import add_schema
from llmtrain.commands.train import add_train


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="llmtrain", description="Pretrain language models from a YAML.")
    root.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        add_train,
        add_prepare,
        add_check,
        add_describe,
        add_eval,
        add_decontaminate,
        add_generate,
        add_import,
        add_export,
        add_checkpoint,
        add_mfu,
        add_doctor,
        add_bench,
        add_schema,
    ):
        add(commands)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed on the way, 2 the request was wrong."""
    root = parser()
    args, rest = root.parse_known_args(argv)
    if rest and hasattr(args, "overrides") and not any(word.startswith("-") for word in rest):
        args.overrides += rest  # `FILE --nproc 2 a.b=c`: argparse gives positionals after an option back
    elif rest:
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return args.func(args)
    except ValueError as error:
        # By the rules of the house a ValueError is addressed to the user: its text is the whole story.
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
