"""`llmtrain export` and `llmtrain import`."""

import argparse
import re
import sys
from pathlib import Path

from llmtrain.commands.arguments import EMA_HELP, output_path
from llmtrain.errors import UserError
from llmtrain.logs import log

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_export(commands) -> None:
    sub = commands.add_parser(
        "export",
        help="write a checkpoint in Hugging Face format",
        description="Writes a checkpoint as a folder that transformers loads by itself: AutoModelForCausalLM and "
        "AutoTokenizer .from_pretrained(OUT). OUT appears when it is complete.",
    )
    sub.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a run's folder (its newest checkpoint), or a checkpoint; either may be in a store (s3://bucket/prefix)",
    )
    sub.add_argument("out", type=output_path, metavar="OUT", help="the folder to make")
    sub.add_argument("--dtype", choices=_DTYPES, default="auto", help="default: auto, as in the checkpoint")
    sub.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="largest file of weights: 5GB (the default), 500MB, ..."
    )
    sub.add_argument(
        "--tokenizer", metavar="TOKENIZER", help="a folder, tokenizer.json or hub name; default: the run's own"
    )
    sub.add_argument(
        "--trim-vocab",
        action="store_true",
        help="leave out the rows of the embedding and the head beyond the tokenizer's last token, such as the padding to a "
        "multiple of 128",
    )
    sub.add_argument("--ema", action="store_true", help=EMA_HELP)
    sub.add_argument(
        "--merge",
        action="store_true",
        help="of a run of adapters: weights that compute the same; otherwise a folder of its adapters alone, for peft",
    )
    sub.set_defaults(func=run_export)


def add_import(commands) -> None:
    sub = commands.add_parser(
        "import",
        help="make a checkpoint of a model in Hugging Face format",
        description="Makes a checkpoint of a published model's weights, for `generate`, `export`, and `init_from` in a run's "
        "YAML. OUT appears when it is complete. docs/models.md lists the families.",
    )
    sub.add_argument("source", metavar="HF_FOLDER", help="a folder with config.json and weights, or a hub name")
    sub.add_argument("out", type=output_path, metavar="OUT", help="the folder to make")
    sub.add_argument(
        "--base",
        metavar="CHECKPOINT",
        help="of a folder of peft's adapters: the checkpoint of the model that they are of",
    )
    sub.set_defaults(func=run_import)


def run_export(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.config.addresses import is_remote
    from llmtrain.config.output_folder import refuse_existing
    from llmtrain.progress import format_bytes

    size = parse_size(args.max_shard_size)
    refuse_existing(args.out)  # before torch is imported
    if not is_remote(args.checkpoint):
        Repository(args.checkpoint).require_any()
    import torch

    from llmtrain.convert.export import export

    made = export(
        args.checkpoint,
        args.out,
        dtype=None if args.dtype == "auto" else getattr(torch, args.dtype),
        max_shard_bytes=size,
        tokenizer=args.tokenizer,
        trim_vocab=args.trim_vocab,
        ema=args.ema,
        merge=args.merge,
        progress=sys.stderr.isatty(),
    )
    dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in made.dtypes))
    files = "1 file" if made.files == 1 else f"{made.files} files"
    trimmed = f" without {made.trimmed:,} rows of padding" if made.trimmed else ""
    written = f"{made.checkpoint} -> {made.out}: {made.architecture}{trimmed}, {dtypes}, {format_bytes(made.nbytes)} in {files}. "
    if made.architecture.startswith("adapters"):
        print(
            f"{written}Next: in Python peft.PeftModel.from_pretrained(base, {str(made.out)!r}), or export with --merge"
        )
        return 0
    print(
        f"{written}Next: llmtrain generate {made.out} --prompt TEXT, or in Python "
        f"transformers.AutoModelForCausalLM.from_pretrained({str(made.out)!r})"
    )
    return 0


def run_import(args: argparse.Namespace) -> int:
    from llmtrain.config.output_folder import refuse_existing
    from llmtrain.progress import format_bytes

    refuse_existing(args.out)
    from llmtrain.convert.import_hf import import_adapters, import_hf

    if args.base or (Path(args.source) / "adapter_config.json").is_file():
        made = import_adapters(Path(args.source), args.out, args.base)
        print(
            f"{made.source} -> {made.out}: {made.parameters:,} parameters of adapters. Next: llmtrain generate {made.out} --prompt "
            f"TEXT, or llmtrain export {made.out} OUT --merge"
        )
        return 0
    made = import_hf(args.source, args.out, progress=sys.stderr.isatty())
    if not made.has_tokenizer:
        log.warning(f"{made.source} has no tokenizer: `llmtrain export {made.out}` will need --tokenizer")
    print(
        f"{made.source} -> {made.out}: {made.architecture}, {made.parameters:,} parameters, {format_bytes(made.nbytes)}. "
        f"Next: llmtrain generate {made.out} --prompt TEXT, or in a run's YAML the model section of "
        f"{made.out / 'model.yaml'} and init_from: {made.out}"
    )
    return 0


def parse_size(text: str) -> int:
    """Bytes of "5GB", "1.5 GiB" or "500_000". Raises UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    size = int(float(match[1].replace("_", "")) * unit) if match and unit else 0
    if size < 1:
        raise UserError(f"--max-shard-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    return size
