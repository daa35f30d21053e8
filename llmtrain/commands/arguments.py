"""Types of command-line arguments."""

import argparse
import re
from pathlib import Path
from typing import Any

from llmtrain.config.addresses import local_problem
from llmtrain.errors import UserError


def output_path(text: str) -> Path:
    """A file or folder to write on this machine. Refuses an address, of which `Path` would make a folder named `s3:`."""
    if problem := local_problem(text):
        raise argparse.ArgumentTypeError(f"{problem}, found {text!r}")
    return Path(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not re.fullmatch(r"\d{1,15}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1")
    return int(text)


def require(args: argparse.Namespace, *names: str, least: float | None = None, most: float | None = None) -> None:
    """Check options that hold a number or None. Raises UserError for one beyond these bounds, and for NaN."""
    for name in names:
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and least is not None and not value >= least:
            raise UserError(f"{option} {value}: expected at least {least}")
        if value is not None and most is not None and not value <= most:
            raise UserError(f"{option} {value}: expected at most {most}")


_CONFIG_HELP = "the YAML, or the name of one that llmtrain brings: quickstart, mpt-1b, zamba2-1.2b, bench/mpt-1b, ..."


def add_config(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """The positional FILE of a run, and settings that replace its own."""
    parser.add_argument("file", nargs="?" if optional else None, metavar="FILE", help=_CONFIG_HELP)
    # With a default, argparse does not ask for them when FILE is missing.
    parser.add_argument("overrides", nargs="*", default=[], metavar="a.b=c", help="settings that replace the file's")


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
        "--weights", choices=("int8", "float8"), help="of linear layers, in 8 bits; default: as --dtype"
    )
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
    return load_model(args.model, dtype, tokenizer, ema=args.ema, adapter=args.adapter, weights=args.weights)
