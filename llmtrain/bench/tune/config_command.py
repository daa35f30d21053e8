"""The verb `llmtrain bench tune FILE`: launches of our kernels for the shapes of a model, then every attention backend on them."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from llmtrain.bench.tune import command, request
from llmtrain.bench.tune.backends import BackendMeasurer, able
from llmtrain.errors import UserError
from llmtrain.kernels import operation, platform, tuning, tuning_table
from llmtrain.kernels.attention import measured
from llmtrain.kernels.attention.measured import OURS
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import KERNELS, Row, searched
from llmtrain.models.backends import Chosen, chosen
from llmtrain.schema.config import Config


@dataclass(frozen=True)
class Item:
    """One search. operation: as in the tables; seq_len, variant: of the rows, None: any."""

    operation: str
    shape: Shape
    seq_len: int | None = None
    variant: str | None = None

    @property
    def label(self) -> str:
        return f"{self.operation} {operation.operation(self.operation).label(replace(self.shape, variant=None))}"


def microbatch(config: Config) -> int:
    """Sequences to measure on: train.microbatch_size, or with auto about 16,384 tokens."""
    size = config.train.microbatch_size
    return max(1, 16384 // config.data.seq_len) if size == "auto" else size


def items(config: Config, here: Platform) -> list[Item]:
    """Searches for what runs by our kernels: attention wherever a block does not name another backend, for whether ours is the
    fastest is not known before; other operations where they are ours already. Each once, in the config's order."""
    return list(dict.fromkeys(item for one in _kernels(config, here) if (item := _item(one, config)) is not None))


def shapes(config: Config, here: Platform) -> list[Shape]:
    """Attention of every block whose backend is `auto` or a family, at the run's length and microbatch."""
    seq_len, batch = config.data.seq_len, microbatch(config)
    found = (one.kernel for one in _kernels(config, here) if one.kernel.operation == "attention")
    return list(dict.fromkeys(Shape(k.spec, batch, seq_len) for k in found if k.backend in ("auto", "sdpa")))


def _kernels(config: Config, here: Platform) -> Iterator[Chosen]:
    return chosen(config.model, here, config.train.dtype, config.data.mask_documents)


def _item(one: Chosen, config: Config) -> Item | None:
    name, spec, backend = one.kernel
    if one.backend is None or not (one.backend == OURS or (name == "attention" and backend == "auto")):
        return None
    if not (tuned := operation.operation(name)).tuned:
        return None
    seq_len = config.data.seq_len
    shape = tuned.of_model(spec, microbatch(config), seq_len, config.data.mask_documents)
    if name != "attention":
        return Item(name, shape)
    return Item(name, shape, min(spec.sliding_window or seq_len, seq_len), shape.variant)


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

    return all(has(kernel) for kernel in searched(item.operation))


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
