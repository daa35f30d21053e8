"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmtrain.config.addresses import local_problem


def output_path(text: str) -> Path:
    """A file or folder to write on this machine. Refuses an address, of which `Path` would make a folder named `s3:`."""
    if problem := local_problem(text):
        raise argparse.ArgumentTypeError(f"{problem}, found {text!r}")
    return Path(text)


EMA_HELP = "the moving average of the weights, which a run with train.ema keeps, in their place"
