"""`llmtrain prepare`: text sources to MDS shards."""

from __future__ import annotations

import argparse

from llmtrain.errors import UserError
from llmtrain.schema.data import PrepareConfig


def add_prepare(commands) -> None:
    sub = commands.add_parser(
        "prepare",
        help="turn text files, source trees and JSONL into MDS shards",
        description="Turns text files, source trees and JSONL (.gz and .zst too) into MDS shards with a tokenizer.",
    )
    sub.add_argument("sources", nargs="+", metavar="SOURCE", help="files, folders, or `stdlib` (Python's own sources)")
    sub.add_argument("--out", required=True, metavar="DIR", help="gets tokenizer/, train/, validation/, manifest.json")
    tokenizer = sub.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME", help="a tokenizer's folder, tokenizer.json or hub name")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of this size")
    sub.add_argument("--seq-len", type=int, default=2048, metavar="N", help="tokens per sample (default 2048)")
    sub.add_argument("--validation-fraction", type=float, default=0.05, metavar="X", help="default 0.05")
    sub.add_argument("--text-key", default="text", metavar="KEY", help="field of a JSONL record (default text)")
    sub.add_argument("--max-bytes", type=int, metavar="N", help="stop after this many bytes of text")
    sub.add_argument("--seed", type=int, default=17, metavar="N", help="of the train/validation split (default 17)")
    sub.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    sub.add_argument("--skip-bad-records", action="store_true", help="name and skip what cannot be read")
    sub.add_argument("--overwrite", action="store_true", help="replace shards made from other sources or settings")
    sub.set_defaults(func=run_prepare)


def run_prepare(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from llmtrain.data.prepare import prepare

    fields = {name: value for name, value in vars(args).items() if name in PrepareConfig.model_fields}
    try:
        config = PrepareConfig.model_validate(fields)
    except ValidationError as error:
        lines = [f"--{'.'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg']}" for e in error.errors()]
        raise UserError("\n".join(lines)) from None
    print(prepare(config, overwrite=args.overwrite).summary())
    return 0
