"""`llmtrain checkpoint ls | show | verify | convert | rm`. Declaring them imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llmtrain.commands.arguments import output_path, require
from llmtrain.errors import UserError
from llmtrain.tables import aligned

if TYPE_CHECKING:
    from llmtrain.checkpoint.base import Checkpoint

_RUN = "a run's folder, a checkpoint, or either in a store: s3://bucket/prefix"


def add_checkpoint(commands) -> None:
    parser = commands.add_parser("checkpoint", help="list, inspect, verify, convert and remove checkpoints")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    sub = actions.add_parser(
        "ls", help="the checkpoints of a run", description="Lists step, tokens, size, age and health; reads no content."
    )
    sub.add_argument("run", metavar="RUN", help=_RUN)
    sub.set_defaults(func=run_ls)

    sub = actions.add_parser("show", help="what a checkpoint is: its manifest, config and tensors")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help=f"{_RUN} (of a run: the newest)")
    sub.add_argument("--config", metavar="FILE", help="compare with this YAML, rather than with the defaults")
    sub.set_defaults(func=run_show)

    sub = actions.add_parser(
        "verify",
        help="read every byte and compare it with what was written",
        description="Exit status 1 when anything is wrong; each file that is, is named.",
    )
    sub.add_argument("run", metavar="RUN", help=_RUN)
    sub.set_defaults(func=run_verify)

    sub = actions.add_parser(
        "convert",
        help="write a checkpoint in another format, or in other files",
        description="Writes OUT, which appears when it is complete. SRC may be in an earlier format of ours, or Composer's "
        "(a file such as ep0-ba100-rank0.pt, or a folder of .distcp files): then its weights alone are taken. No pickled "
        "code is run, whatever a file holds.",
    )
    sub.add_argument("source", metavar="SRC", help="a checkpoint, a run's folder (its newest), or a file of Composer's")
    sub.add_argument("out", type=output_path, metavar="OUT", help="the folder to make")
    sub.add_argument("--to", choices=("hf", "llmtrain"), required=True, help="hf: what `llmtrain export` writes")
    sub.add_argument("--shards", type=int, metavar="N", help="files of tensors to write, about; default: by size")
    sub.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="for hf; default: auto, as SRC",
    )
    sub.add_argument("--config", metavar="FILE", help="for Composer's format: a YAML with the `model` section")
    sub.add_argument("--tokenizer", metavar="TOKENIZER", help="for hf: a folder, tokenizer.json or hub name")
    sub.set_defaults(func=run_convert)

    sub = actions.add_parser(
        "rm", help="remove checkpoints", description="The last good one is never removed without --force."
    )
    sub.add_argument("run", metavar="RUN", help=_RUN)
    which = sub.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="this one")
    which.add_argument("--before", type=int, metavar="N", help="all before this step")
    which.add_argument("--keep-last", type=int, metavar="K", help="all but the newest K that are good")
    sub.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    sub.add_argument("--force", action="store_true", help="even the last good one")
    sub.set_defaults(func=run_rm)


def run_ls(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.progress import format_bytes

    rows = [("CHECKPOINT", "STEP", "TOKENS", "SIZE", "AGE", "HEALTH")]
    for item in Repository(args.run).require_any():
        tokens = f"{item.manifest.tokens:,}" if item.manifest else ""
        rows.append((item.name, f"{item.step:,}", tokens, format_bytes(item.nbytes), item.age, item.health))
    for line in aligned(rows, left=(0, 5)):
        print(line)
    return 0


def run_show(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.checkpoint.summary import summary

    for line in summary(Repository(args.checkpoint).find(), args.config):
        print(line)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.beneath import checkpoint_beneath
    from llmtrain.checkpoint.format.manifest import CheckpointError
    from llmtrain.checkpoint.local import folder_name
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.progress import ByteBar, format_bytes

    found = Repository(args.run).require_any()
    wrong, verified = 0, set[str]()
    with ByteBar(sys.stderr.isatty(), sum(item.manifest.nbytes for item in found if item.manifest), "verify") as bar:
        for item in found:
            if item.in_progress and item.name != folder_name(item.step) and len(found) > 1:
                print(f"{item.name}: {item.health}")  # no damage: it has not a checkpoint's name
                continue
            bar.stage(item.name)
            try:
                item.verify(bar.advance)
                below = checkpoint_beneath(item.address, item.require())
                while below is not None and below.address not in verified:
                    below.verify()
                    verified.add(below.address)
                    below = checkpoint_beneath(below.address, below.require())
            except CheckpointError as error:
                wrong += 1
                print(f"{item.name}: WRONG: {error}")
            else:
                assert item.manifest is not None
                print(f"{item.name}: good ({len(item.manifest.files)} files, {format_bytes(item.manifest.nbytes)})")
    return 1 if wrong else 0


def run_convert(args: argparse.Namespace) -> int:
    from llmtrain.config.output_folder import refuse_existing

    require(args, "shards", least=1)
    if args.to == "llmtrain" and (args.dtype != "auto" or args.tokenizer):
        raise UserError("--dtype and --tokenizer have no effect with --to llmtrain, which keeps every number as it is")
    refuse_existing(args.out)  # before torch is imported
    from llmtrain.convert.checkpoint_convert import convert

    print(convert(args.source, args.out, args, progress=sys.stderr.isatty()))
    return 0


def run_rm(args: argparse.Namespace) -> int:
    from llmtrain.checkpoint.repository import Repository
    from llmtrain.progress import format_bytes

    found = Repository(args.run).require_any()
    selected = _selected(found, args)
    good = [item for item in found if item.manifest]
    if good and all(item in selected for item in good) and not args.force:
        raise UserError(
            f"{good[-1].name} is the last good checkpoint of {args.run}; add --force to remove even that one (nothing was)"
        )
    for item in selected:
        what = f"{item.address} ({format_bytes(item.nbytes)}, {item.health})"
        if not args.dry_run:
            item.delete()
        print(f"{'would remove' if args.dry_run else 'removed'} {what}")
    if not selected:
        print("nothing to remove")
    return 0


def _selected(found: Sequence[Checkpoint], args: argparse.Namespace) -> list[Checkpoint]:
    if args.step is not None:
        selected = [item for item in found if item.step == args.step]
        if not selected:
            steps = ", ".join(str(item.step) for item in found)
            raise UserError(f"{args.run} has no checkpoint of step {args.step}; there is {steps}")
        return selected
    if args.before is not None:
        return [item for item in found if item.step < args.before]
    require(args, "keep_last", least=1)
    good = [item for item in found if item.manifest]
    if not good:
        raise UserError(f"{args.run} has no good checkpoint to keep; name one with --step")
    # What is not good but newer is left: it may be looked at, or is being written.
    oldest = good[-args.keep_last :][0]
    return [item for item in found if item.step < oldest.step]
