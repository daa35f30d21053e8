"""Types of command-line arguments."""

import argparse
from pathlib import Path
from typing import Any

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


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run's folder (its newest checkpoint), a checkpoint, or a folder or hub name in Hugging Face format",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The form in which MODEL is read."""
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on a GPU")
    parser.add_argument(
        "--tokenizer", metavar="TOKENIZER", help="a folder, tokenizer.json or hub name; default: the model's own"
    )
    parser.add_argument("--ema", action="store_true", help=EMA_HELP)
    parser.add_argument("--adapter", metavar="ADAPTER", help="a folder of peft's, or a run of adapters, of this model")


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer). Raises UserError."""
    import torch

    from llmtrain.data.tokenize.tokenizer import load_tokenizer
    from llmtrain.generate.load import load_model

    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return load_model(args.model, dtype, tokenizer, ema=args.ema, adapter=args.adapter)
