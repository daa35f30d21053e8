"""`llmtrain prepare`: text sources to MDS shards."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmtrain.commands.arguments import positive
from llmtrain.config.addresses import is_remote
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from pydantic import ValidationError


def add_prepare(commands) -> None:
    sub = commands.add_parser(
        "prepare",
        help="turn text files, source trees, JSONL, Parquet, Arrow and CSV into MDS shards",
        description="Turns text files, source trees, JSONL, JSON, Parquet, Arrow and CSV, plain or compressed, into MDS shards "
        "with a tokenizer. The same command goes on after a kill, and makes anew only what has changed.",
    )
    sub.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="files, folders, globs, s3:// or hf:// addresses, or `stdlib` (Python's own sources)",
    )
    sub.add_argument(
        "--stream",
        action="append",
        dest="streams",
        type=_stream,
        metavar="NAME=SOURCE",
        help="in place of SOURCE: a source of one stream of a mixture, once or more for each; DIR/NAME gets its shards, and "
        "DIR/data.yaml the streams for a run's YAML",
    )
    sub.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="gets tokenizer/, train/, validation/, manifest.json; a folder, or s3://BUCKET/FOLDER",
    )
    tokenizer = sub.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", metavar="NAME", help="a tokenizer's folder, tokenizer.json or hub name")
    tokenizer.add_argument("--vocab-size", type=int, metavar="N", help="train a byte-level BPE of this size")
    sub.add_argument(
        "--tokenizer-engine",
        choices=["auto", "gigatoken", "tiktoken", "tokenizers"],
        default="auto",
        help="library that encodes (default auto: the fastest that is installed and proved equal on this input)",
    )
    sub.add_argument("--seq-len", type=int, default=2048, metavar="N", help="tokens per sample (default 2048)")
    sub.add_argument(
        "--packing",
        choices=["concatenate", "best_fit", "padded"],
        default="concatenate",
        help="best_fit: documents stay whole where they fit; padded: the same, one in each sample; both are trained on with "
        "data.mask_documents (default concatenate, and of conversations best_fit)",
    )
    sub.add_argument(
        "--compression",
        default="none",
        metavar="X",
        help="of the shards: none, zstd (for a store) or zstd:LEVEL (default none)",
    )
    sub.add_argument("--add-bos-token", action="store_true", help="begin each document with the tokenizer's bos_token")
    sub.add_argument(
        "--no-eos-token", dest="add_eos_token", action="store_false", help="do not close documents with the eos_token"
    )
    held = sub.add_mutually_exclusive_group()
    held.add_argument("--validation-fraction", type=float, default=0.05, metavar="X", help="default 0.05")
    held.add_argument(
        "--validation-tokens",
        type=positive,
        metavar="N",
        help="hold out about N tokens, of each stream where there are several",
    )
    sub.add_argument("--text-key", default="text", metavar="KEY", help="field or column of a record (default text)")
    chat = sub.add_argument_group(
        "conversations, or prompts and completions",
        "recognised by the first record's fields; docs/data.md has the formats",
    )
    chat.add_argument(
        "--chat-format",
        choices=["messages", "completion", "sharegpt", "alpaca", "pairs", "labels"],
        help="where no field tells",
    )
    chat.add_argument(
        "--chat-field",
        action="append",
        dest="chat_fields",
        type=_field,
        metavar="FIELD=NAME",
        help="a field of the format that has another name in the records, such as prompt=question",
    )
    chat.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a file of Jinja, chatml, or tokenizer for its own (default, of messages)",
    )
    chat.add_argument("--chat-targets", choices=["all", "last"], help="answers that are trained (default all)")
    chat.add_argument(
        "--chat-prompts", metavar="X", help="prompts that are trained as well: none, all or length>=N (default none)"
    )
    sub.add_argument("--max-bytes", type=int, metavar="N", help="stop after this many bytes of text")
    sub.add_argument("--seed", type=int, default=17, metavar="N", help="of the train/validation split (default 17)")
    sub.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    sub.add_argument(
        "--engine",
        choices=["processes", "ray"],
        default="processes",
        help="what they are: processes of this machine, or a Ray cluster whose nodes share DIR (default processes)",
    )
    sub.add_argument(
        "--dedup",
        action="store_true",
        help="leave out documents whose text equals that of an earlier one; with --stream, of an earlier one of the same stream",
    )
    bad = sub.add_mutually_exclusive_group()
    bad.add_argument("--skip-bad-records", action="store_true", help="name and skip all that cannot be read")
    bad.add_argument(
        "--max-bad",
        type=_share,
        metavar="X",
        help="skip as much: 0.1%% or 0.001 of the text (default 0, but a tenth of files in folders that are not UTF-8)",
    )
    sub.add_argument("--overwrite", action="store_true", help="replace shards made from other sources or settings")
    several = sub.add_mutually_exclusive_group()
    several.add_argument(
        "--part",
        type=_part,
        metavar="I/N",
        help="make the I-th of N shares of the work (1/N to N/N), for --merge afterwards",
    )
    several.add_argument("--merge", action="store_true", help="make nothing, merge the parts that are made")
    sub.set_defaults(func=run_prepare)


def _share(text: str) -> float:
    """The number of `0.001` or `0.1%`."""
    from llmtrain.config.base import parse_share

    try:
        return parse_share(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _stream(text: str) -> tuple[str, str]:
    """The name and the source of `web=s3://bucket/web`."""
    name, equals, source = text.partition("=")
    if not equals or not source:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=SOURCE")
    from llmtrain.schema.data import stream_name

    try:
        return stream_name(name), source
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {name} {error}") from None


def _field(text: str) -> tuple[str, str]:
    field, equals, name = text.partition("=")
    if not field or not equals or not name:
        raise argparse.ArgumentTypeError(f"{text}: expected FIELD=NAME")
    return field, name


def _chat(args: argparse.Namespace) -> dict[str, Any] | None:
    """The section `chat`; None where nothing of it is given."""
    names = ("format", "fields", "template", "targets", "prompts")
    given = {name: value for name in names if (value := getattr(args, f"chat_{name}")) is not None}
    return given | ({"fields": dict(given["fields"])} if "fields" in given else {}) or None


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text}: expected I/N with I from 1 to N")
    return int(match[1]), int(match[2])


def _wrong_options(error: ValidationError) -> Iterator[str]:
    """A line for each option that cannot be taken."""
    from llmtrain.config.base import Problem

    for one in error.errors():
        rules: list[Problem] = one.get("ctx", {}).get("problems") or [
            Problem(".".join(map(str, one["loc"])), None, one["msg"])
        ]
        for rule in rules:
            name = "no-eos-token" if rule.path == "add_eos_token" else rule.path.replace("_", "-")
            yield f"--{name}: {rule.message}"


def run_prepare(args: argparse.Namespace) -> int:
    from pydantic import ValidationError

    from llmtrain.data.partitions.stored_folder import scratch_folder
    from llmtrain.data.prepare import Part, PartState, prepare, prepare_part
    from llmtrain.data.prepare_streams import hold_out, prepare_streams
    from llmtrain.schema.data import PrepareConfig

    streams: dict[str, list[str]] = {}
    for name, source in args.streams or ():
        streams.setdefault(name, []).append(source)
    if bool(streams) == bool(args.sources):
        raise UserError(
            "give sources, or --stream NAME=SOURCE for each stream of a mixture" + ", not both" * bool(streams)
        )
    if streams and (args.part or args.merge):
        raise UserError(
            "--part and --merge take one stream at a time: give its sources, and its folder as --out DIR/NAME"
        )
    if args.engine == "ray" and args.part:
        raise UserError("--engine ray divides the work itself; leave --part out")
    address = args.out if is_remote(args.out) else None
    if address and streams:
        raise UserError(
            "--stream makes folders on this machine; give the sources of one stream, and --out s3://BUCKET/NAME"
        )
    fields = {name: value for name, value in vars(args).items() if name in PrepareConfig.model_fields}
    fields["streams"], fields["chat"] = streams or None, _chat(args)
    if address:
        fields["out"] = str(scratch_folder(address))
    try:
        config = PrepareConfig.model_validate(fields)
    except ValidationError as error:
        raise UserError("\n".join(_wrong_options(error))) from None
    if streams:
        print(prepare_streams(config, overwrite=args.overwrite).summary())
        return 0
    config = hold_out(config)
    if args.part is None:
        print(prepare(config, overwrite=args.overwrite, merge_only=args.merge, address=address).summary())
        return 0
    part = Part(*args.part)
    state = prepare_part(config, part, overwrite=args.overwrite, address=address)
    this = f"part {part.index} of {part.count}"
    said = {
        PartState.HASHED: f"{this} has compared its documents; once all parts have come so far, give the same command again, "
        "which makes the shards",
        PartState.MADE: f"{this} is made; once all are, give --merge in place of --part",
        PartState.MERGED: f"{args.out} is complete: its parts are merged, and none is left to make (--overwrite makes it anew)",
    }
    print(said[state])
    return 0
