"""The verb `llmtrain bench tune`, from its arguments to the row in the table."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

from llmtrain.bench.tune import search
from llmtrain.bench.tune.compiling import default_workers, platform_of
from llmtrain.bench.tune.measuring import Measurer
from llmtrain.bench.tune.operations import Attempt, problem
from llmtrain.errors import UserError
from llmtrain.kernels import platform, tuning, tuning_table
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.tuning_table import Row


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a request that makes no sense, or where there is no GPU."""
    case = case_of(args)
    here = platform.detect()
    # Says what is wrong with the case before anything else, also where there is no GPU.
    where = platform_of("sm90") if here.vendor == "cpu" else here
    rehearsal = problem(args.operation, case, "meta", where)
    parts = chosen_parts(list(rehearsal.parts), args.kernels)
    if here.vendor == "cpu":
        raise UserError(
            "bench tune times kernels on a GPU, and this machine has none; run it where the kernels will run"
        )
    variant = getattr(rehearsal.case, "variant", None)
    rows = tuned(args, args.operation, case, parts, here, args.seq_len, variant)
    if not rows:
        print("no candidate can serve: nothing written")
        return 1
    for row in rows:
        print(tuning_table.dump_row(row), end="")
    if not args.dry_run:
        print(f"written to {write(args, here, rows)}")
    return 0


def tuned(
    args: argparse.Namespace, operation: str, case: dict[str, Any], parts: list[str], here: Platform, seq_len: int | None,
    variant: str | None,
) -> list[Row]:  # fmt: skip
    """Rows of the fastest launches of `parts` of a case, after a search that says how it goes. seq_len, variant: of the rows."""
    began = time.perf_counter()
    rehearsal, workers = problem(operation, case, "meta", here), args.workers or default_workers()
    attempts = search.compile_candidates(operation, case, rehearsal, parts, here, args.quick, workers, search.progress)
    compiled = time.perf_counter() - began
    with Measurer(operation, case) as measurer:
        ranked = search.measure(attempts, measurer, search.progress)
        show(attempts, args.top)
        winners = rehearsal.winners(ranked, measurer)
    rows = [search.row(winner, rehearsal, here, case["dtype"], seq_len, variant) for winner in winners]
    if operation == "ssd":
        rows = [replace(r, shared=search.shared_of("ssd", case, r.launch, here)) for r in rows]
    total = time.perf_counter() - began
    print(f"{sum(map(len, attempts.values()))} candidates in {total:.0f} s, of which {compiled:.0f} s compiling")
    return rows


def case_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of the operation's Case. Raises UserError for a malformed --shape."""
    case: dict[str, Any] = {"dtype": args.dtype}
    for word in args.shape:
        name, equals, size = word.partition("=")
        if not equals or not size.isdigit() or int(size) == 0:
            raise UserError(f"--shape takes NAME=SIZE, such as head_dim=128, not '{word}'")
        case[name] = int(size)
    if args.seq_len is not None:
        case["seq_len"] = args.seq_len
    if args.variant is not None:
        case["variant"] = args.variant
    return case


def chosen_parts(parts: list[str], wanted: list[str] | None) -> list[str]:
    """The parts (KERNEL or KERNEL/CHUNK) that are wanted by name. Raises UserError for an unknown name."""
    if wanted is None:
        return parts
    for name in wanted:
        if not any(name in (part, part.split("/")[0]) for part in parts):
            raise UserError(f"no kernel '{name}'; there is {', '.join(dict.fromkeys(p.split('/')[0] for p in parts))}")
    return [part for part in parts if part in wanted or part.split("/")[0] in wanted]


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
    if args.into_package:
        arch = tuning.nearest(here)
        if arch != here.arch:
            raise UserError(
                f"there is no shipped table for {here.arch}; its rows come from {arch}'s: leave --into-package out"
            )
        file = tuning.FOLDER / f"{arch}.yaml"
        tuning_table.save(file, arch, rows, tuning.read_shipped(arch).l2_budget)
    else:
        file = args.out or tuning.own_file(here.arch)
        tuning_table.save(file, here.arch, rows)
    tuning.forget()
    return file
