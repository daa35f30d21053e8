"""Checks of a request to `bench tune`, before anything is compiled, also where there is no GPU."""

import argparse
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmtrain.config.output_folder import unwritable_reason
from llmtrain.errors import UserError
from llmtrain.kernels import operation, tuning, tuning_table
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.search import Search

LARGEST = 1 << 22
"""Most of any size: of tensors with such sizes PyTorch can still count the bytes."""


def case_of(args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of the operation's shape. Raises UserError for options that make none, or one that no kernel of ours can serve."""
    fields: dict[str, Any] = {"dtype": args.dtype}
    for word in args.shape:
        name, equals, size = word.partition("=")
        if not equals:
            raise UserError(f"--shape takes NAME=SIZE, such as head_dim=128, not '{word}'")
        if name in ("dtype", "variant"):
            raise UserError(f"--shape {word}: {name} is no size; give it by --{name}")
        fields[name] = _size(f"--shape {word}", size)
    if args.seq_len is not None:
        fields["seq_len"] = _size(f"--seq-len {args.seq_len}", str(args.seq_len))
    if args.variant is not None:
        fields["variant"] = args.variant
    one = operation.tuned(args.operation)
    shape = one.shape(fields)
    for name, parameter in inspect.signature(one.sized, eval_str=True).parameters.items():
        if parameter.annotation is bool and fields.get(name, 0) not in (0, 1):
            raise UserError(f"{_asked(args)}: {name} is 1, or left out")
    if reason := one.refusal(shape):
        raise UserError(f"{_asked(args)}: {reason}")
    return fields


def rehearse(args: argparse.Namespace, fields: dict[str, Any], where: Platform) -> tuple[Search, list[str]]:
    """The search without memory, and the parts of it that are wanted. Raises UserError where no search can begin."""
    try:
        made = operation.search(args.operation, fields, "meta", where)
        parts = chosen_parts(list(made.parts), args.kernels)
        for part in parts:
            made.candidates(part, args.quick)
    except tuning.Untuned:
        raise UserError(
            f"{_asked(args)}: larger than what our kernels serve on {where.arch} in {args.dtype}: a search begins at a row of "
            "the tuning table, which has none as large; take smaller sizes"
        ) from None
    return made, parts


def chosen_parts(parts: list[str], wanted: Sequence[str] | None) -> list[str]:
    """The parts (KERNEL or KERNEL/CHUNK) that are wanted by name. Raises UserError for an unknown name."""
    if wanted is None:
        return parts
    for name in wanted:
        if not any(name in (part, part.split("/")[0]) for part in parts):
            raise UserError(f"no kernel '{name}'; there is {', '.join(dict.fromkeys(p.split('/')[0] for p in parts))}")
    return [part for part in parts if part in wanted or part.split("/")[0] in wanted]


def target(args: argparse.Namespace, here: Platform) -> Path:
    """The file that the rows are for. Raises UserError for --into-package where this architecture has no shipped table."""
    if not args.into_package:
        return args.out or tuning.own_file(here.arch)
    arch = tuning.nearest(here)
    if arch != here.arch:
        raise UserError(
            f"there is no shipped table for {here.arch}; its rows come from {arch}'s: leave --into-package out"
        )
    return tuning.FOLDER / f"{arch}.yaml"


def refuse_target(file: Path, arch: str | None) -> None:
    """Check that rows can be written into `file`. arch: the architecture that rows in it must be for; None: any.

    Raises UserError for a folder, a place that cannot be written to, and a file that is no such table.
    """
    if file.is_dir():
        raise UserError(f"{file} is a folder, where rows need a file; name one, such as --out {file / 'tuning.yaml'}")
    if reason := unwritable_reason(file.parent):
        raise UserError(f"no row can be written to {file}: {reason}")
    if file.exists():
        tuning_table.load(file, arch, own=True)


def _size(given: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 0 < int(text) <= LARGEST:
        raise UserError(f"{given}: a size is a whole number above 0, at most {LARGEST}")
    return int(text)


def _asked(args: argparse.Namespace) -> str:
    """The options that say what is tuned."""
    words = [f"--operation {args.operation}"]
    words += [f"--shape {' '.join(args.shape)}"] * bool(args.shape)
    words += [f"--variant '{args.variant}'"] * (args.variant is not None)
    return " ".join(words)
