"""The verb `llmtrain bench tune FILE`: launches of our kernels for the shapes of a model, then every attention backend on them."""

import argparse
import sys
from pathlib import Path

from llmtrain.bench.tune import command, request
from llmtrain.bench.tune.backends import BackendMeasurer, able
from llmtrain.bench.tune.config_cases import Item, items, shapes
from llmtrain.errors import UserError
from llmtrain.kernels import operation, platform, tuning, tuning_table
from llmtrain.kernels.attention import measured
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import KERNELS, Row
from llmtrain.schema.config import Config


def run(args: argparse.Namespace, config: Config) -> int:
    """Write rows as they are found, so that the same command goes on where it was interrupted. Returns 1 if nothing could be
    measured. Raises UserError for options that make no sense with a FILE, or where there is no GPU."""
    own_shape = args.shape or args.variant or args.seq_len is not None
    if own_shape or args.kernels or args.into_package or args.operation != "attention":
        raise UserError(
            "with FILE, bench tune takes its shapes from the file: leave out --operation, --shape, --seq-len, --variant, "
            "--kernels and --into-package"
        )
    here = platform.detect()
    if here.vendor == "cpu":
        raise UserError(
            "bench tune times kernels on a GPU, and this machine has none; run it where the kernels will run"
        )
    file = request.target(args, here)
    if args.dry_run:
        return _run(args, config, here, file)
    request.refuse_target(file, here.arch)
    with tuning.to_be_made(file):
        return _run(args, config, here, file)


def _run(args: argparse.Namespace, config: Config, here: Platform, file: Path) -> int:
    cells = file.with_suffix(".attention.csv")
    searches, attention = items(config, here), shapes(config, here)
    print(
        f"{len(searches)} kernels to tune, {len(attention)} shapes of attention to measure; rows go to {file} and {cells}"
    )
    done = _own(file, here)
    for item in searches:
        if not args.again and _tuned(item, done, here):
            print(f"{item.label}: tuned already")
            continue
        print(item.label, flush=True)
        _tune(args, item, here, file, cells)
    with BackendMeasurer(here) as measurer:
        count = sum(_measure(args, shape, here, cells, measurer) for shape in attention)
    print(f"{config.name}: done; llmtrain doctor {args.file} says which backends `auto` takes now")
    return 0 if count or not attention or args.dry_run else 1


def _own(file: Path, here: Platform) -> list[Row]:
    return list(tuning_table.load(file, here.arch, own=True).rows) if file.exists() else []


def _tuned(item: Item, rows: list[Row], here: Platform) -> bool:
    """True if every kernel of the item has a row of its own key that was measured on this kind of device."""
    spec = item.shape.spec

    def has(kernel: str) -> bool:
        shape = tuple(getattr(spec, name) for name in KERNELS[kernel].shape)
        key = (kernel, spec.dtype, shape, item.seq_len, item.variant)
        return any(
            row.key == key and isinstance(row.provenance, dict) and row.provenance["device"] == here.device_name
            for row in rows
        )

    # attention.dscores is not tuned: its row says from which length on it takes the place of dq and dkdv.
    kernels = [k for k in KERNELS if k.partition(".")[0] == item.operation and k != "attention.dscores"]
    return all(has(kernel) for kernel in kernels)


def _tune(args: argparse.Namespace, item: Item, here: Platform, file: Path, cells: Path) -> None:
    case = item.shape.fields()
    parts = list(operation.search(item.operation, case, "meta", here).parts)
    rows = command.tuned(args, item.operation, case, parts, here, item.seq_len, item.variant)
    if not rows:
        print(f"{item.label}: no candidate can serve; it keeps the launches that it has", file=sys.stderr)
    if not rows or args.dry_run:
        return
    tuning_table.save(file, here.arch, rows)
    tuning.forget()
    if item.operation == "attention":  # what was measured of ours was by other launches
        measured.discard(cells, lambda row: row.backend == measured.OURS and row.head_dim == item.shape.spec.head_dim)


def _measure(args: argparse.Namespace, shape: Shape, here: Platform, cells: Path, measurer: BackendMeasurer) -> int:
    """Number of backends that have a row of the shape now."""
    cell = measured.Cell.of(shape.spec, shape.seq_len)
    known = {row.backend for row in measured.read(cells) if row.cell == cell and row.device == here.device_name}
    count = 0
    for backend in able(shape.spec, here):
        if backend in known and not args.again:
            print(f"{cell.label}: {backend}: measured already")
            count += 1
            continue
        found = measurer(shape, backend)
        if isinstance(found, str):
            print(f"{cell.label}: {backend}: {found}", file=sys.stderr)
            continue
        print(f"{cell.label}: {backend}: {found.forward_ms:.3f} + {found.backward_ms:.3f} ms", flush=True)
        count += 1
        if not args.dry_run:
            measured.save(cells, [found])
    return count
