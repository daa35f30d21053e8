"""Types of command-line arguments."""

import argparse
from pathlib import Path

from llmtrain.config.addresses import local_problem
from llmtrain.errors import UserError


def output_path(text: str) -> Path:
    """A file or folder to write on this machine. Refuses an address, of which `Path` would make a folder named `s3:`."""
    if problem := local_problem(text):
        raise argparse.ArgumentTypeError(f"{problem}, found {text!r}")
    return Path(text)


def require_at_least(least: int, args: argparse.Namespace, *names: str) -> None:
    """Check options that hold a number or None. Raises UserError for one below `least`, and for NaN."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least {least}")


def require_at_most(most: int, args: argparse.Namespace, *names: str) -> None:
    """Check options that hold a number or None. Raises UserError for one above `most`."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value > most:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at most {most}")


EMA_HELP = "the moving average of the weights, which a run with train.ema keeps, in their place"
