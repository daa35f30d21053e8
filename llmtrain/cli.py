"""The `llmtrain` command. Its verbs are in `llmtrain.commands`; none imports torch to parse."""

import argparse
import os
import pwd
import sys
from collections.abc import Sequence
from itertools import pairwise

from llmtrain import __version__
from llmtrain.commands.bench import add_bench
from llmtrain.commands.check import add_check
from llmtrain.commands.checkpoint import add_checkpoint
from llmtrain.commands.compare import add_compare
from llmtrain.commands.convert import add_export, add_import
from llmtrain.commands.data import add_data
from llmtrain.commands.describe import add_describe, add_mfu
from llmtrain.commands.doctor import add_doctor
from llmtrain.commands.eval import add_decontaminate, add_eval
from llmtrain.commands.generate import add_generate
from llmtrain.commands.launchers import add_launchers
from llmtrain.commands.migrate import add_migrate
from llmtrain.commands.plot import add_plot
from llmtrain.commands.prepare import add_prepare
from llmtrain.commands.schema import add_schema
from llmtrain.commands.serve import add_serve
from llmtrain.commands.train import add_train
from llmtrain.errors import exit_status, exit_with, open_streams


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="llmtrain", description="Pretrain language models from a YAML.")
    root.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        add_train,
        add_prepare,
        add_data,
        add_check,
        add_describe,
        add_eval,
        add_compare,
        add_plot,
        add_decontaminate,
        add_generate,
        add_serve,
        add_import,
        add_export,
        add_migrate,
        add_checkpoint,
        add_mfu,
        add_doctor,
        add_bench,
        add_launchers,
        add_schema,
    ):
        add(commands)
    return root


def _name_user() -> None:
    """Set USER and HOME where the user id has no entry in passwd (`docker run -u 12345`): Python's getuser, which torch calls, and
    Path.home need them. HOME is then `/`, as container runtimes have it."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", f"uid-{os.getuid()}")
        os.environ.setdefault("HOME", "/")


def _share_cores() -> None:
    """Have the threads of an operator wait for each other asleep, after some microseconds, where other jobs use all cores: one that
    waits at work keeps the last from its core. Read by libgomp, PyTorch's OpenMP, as it is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ and os.getloadavg()[0] >= (os.cpu_count() or 1):
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status (see `llmtrain.errors`)."""
    open_streams()
    _name_user()
    _share_cores()
    root = parser()
    given = list(sys.argv[1:] if argv is None else argv)
    if any(word == "" and before not in ("--prompt", "--stop") for before, word in pairwise(["", *given])):
        root.error("one of the arguments is empty; if a shell variable stands there, it has no value")
    args, rest = root.parse_known_args(argv)
    if rest and "overrides" in args and not any(word.startswith("-") for word in rest):
        args.overrides += rest  # `FILE --nproc 2 a.b=c`: argparse returns positionals after an option as the rest
    elif rest:
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    return exit_status(lambda: args.func(args))


if __name__ == "__main__":
    exit_with(main)
