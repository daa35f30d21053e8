"""Arguments that name a model to write text with, and its loading: generate, serve."""

import argparse
from typing import Any

from llmtrain.commands.arguments import EMA_HELP


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
