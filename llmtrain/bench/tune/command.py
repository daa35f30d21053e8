"""The verb `llmtrain bench tune`, from its arguments to the row in the table."""

import argparse
import contextlib
import json
import time
from dataclasses import replace
from typing import Any

from llmtrain.bench.tune import request, search
from llmtrain.bench.tune.compiling import default_workers, platform_of
from llmtrain.bench.tune.measuring import Measurer
from llmtrain.errors import UserError
from llmtrain.kernels import operation, platform, tuning, tuning_table
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.search import Attempt, Search
from llmtrain.kernels.tuning_table import Row


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a request that makes no sense, or where there is no GPU."""
    case = request.case_of(args)
    here = platform.detect()
    has_gpu = here.vendor != "cpu"
    where = here if has_gpu else platform_of(tuning.named_arch() or "sm90")
    file = request.target(args, where)
    if not args.dry_run:
        request.refuse_target(file, where.arch if has_gpu else None)
    with contextlib.nullcontext() if args.dry_run else tuning.to_be_made(file):
        rehearsal, parts = request.rehearse(args, case, where)
        return _run(args, case, rehearsal, parts, here)


def _run(args: argparse.Namespace, case: dict[str, Any], rehearsal: Search, parts: list[str], here: Platform) -> int:
    if here.vendor == "cpu":
        raise UserError(
            "bench tune times kernels on a GPU, and this machine has none; run it where the kernels will run"
        )
    rows = tuned(args, args.operation, case, parts, here, args.seq_len, rehearsal.shape.variant)
    if not rows:
        print("no candidate can serve: nothing written")
        return 1
    for row in rows:
        print(tuning_table.dump_row(row), end="")
    if not args.dry_run:
        print(f"written to {write(args, here, rows)}")
    return 0


def tuned(
    args: argparse.Namespace, name: str, case: dict[str, Any], parts: list[str], here: Platform, seq_len: int | None,
    variant: str | None,
) -> list[Row]:  # fmt: skip
    """Rows of the fastest launches of `parts` of a case, after a search that says how it goes. seq_len, variant: of the rows."""
    began = time.perf_counter()
    rehearsal, workers = operation.search(name, case, "meta", here), args.workers or default_workers()
    attempts = search.compile_candidates(name, case, rehearsal, parts, here, args.quick, workers, search.progress)
    compiled = time.perf_counter() - began
    with Measurer(name, case) as measurer:
        ranked = search.measure(attempts, measurer, search.progress)
        show(attempts, args.top)
        winners = rehearsal.winners(ranked, measurer)
    rows = [search.row(winner, rehearsal, here, seq_len, variant) for winner in winners]
    if name == "ssd":
        rows = [replace(r, shared=search.shared_of("ssd", case, r.launch, here)) for r in rows]
    total = time.perf_counter() - began
    print(f"{sum(map(len, attempts.values()))} candidates in {total:.0f} s, of which {compiled:.0f} s compiling")
    return rows


def show(attempts: dict[str, list[Attempt]], top: int) -> None:
    """The fastest of every part, and how many failed why."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", "launch", "ms", "error", "shared", box=None)
    for part, ones in attempts.items():
        able = sorted((one for one in ones if one.problem is None), key=lambda one: one.ms)
        for one in able[:top]:
            launch = json.dumps({name: value for name, value in one.launch.items() if value is not None})
            table.add_row(part, launch, f"{one.ms:.4f}", f"{one.error:.1e}", f"{one.shared:,}")
        failed = [one.problem for one in ones if one.problem is not None]
        if failed:
            table.add_row(part, f"{len(failed)} dropped, such as: {failed[0][:90]}", "", "", "")
    Console().print(table)


def write(args: argparse.Namespace, here: Platform, rows: list[Row]) -> Any:
    """Returns the file."""
    file = request.target(args, here)
    budget = tuning.read_shipped(here.arch).l2_budget if args.into_package else None
    tuning_table.save(file, here.arch, rows, budget)
    tuning.forget()
    return file
