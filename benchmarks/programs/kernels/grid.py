"""Every operation over the grid of grid_cells.py, by every backend that can serve, as CSV.

    python -m benchmarks grid [--only attention ssd …] [--backends triton flex …] [--match TEXT] [--seconds 400] --out grid.csv
    python -m benchmarks grid --drawn 26 2711 --out drawn.csv      # 26 shapes of attention that no list names, by a seed

`llmtrain bench kernels` holds our kernels to bars at a few shapes. This shows all the others. Milliseconds are medians of the
device's own time with a cold L2 cache, wall_ms is forward and backward by the host's clock, error is the largest relative one of
output and gradients against float64. What is to be compiled is compiled first, side by side, for at most half of --seconds. A row
is written as soon as it is measured, in order of value; the same command again measures what the file lacks.
"""

import csv
import datetime
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.programs.kernels import grid_cells
from llmtrain.bench.kernels import cell as cells
from llmtrain.bench.kernels.cell import Cell
from llmtrain.bench.kernels.command import add_peers
from llmtrain.bench.kernels.measure import Ceilings, measure
from llmtrain.bench.tune.search import commit
from llmtrain.kernels import operation as operations
from llmtrain.kernels import platform
from llmtrain.kernels.attention import spec
from llmtrain.kernels.operation import Shape, run_both

COLUMNS = (
    *("operation", "cell", "seq_len", "backend"),
    *("forward_ms", "backward_ms", "wall_ms", "error"),
    *("device", "date", "commit", "failed"),
)
OPERATIONS = ("attention", "ssd", "others")
CHUNKS = (256, 128)
"""Of mamba_ssm's scan."""
REP_MS = 15.0
SHARES = 8

Makers = list[Callable[[], Cell]]
Drawn = tuple[int, int] | None
"""Number and seed of shapes of attention in place of the grid's."""


def makers(drawn: Drawn = None) -> dict[str, Makers]:
    """Functions that build the cells, by operation: a cell is built when it is its turn."""
    shapes = grid_cells.attention() if drawn is None else grid_cells.drawn_attention(*drawn)
    return {
        "attention": [
            lambda shape=shape: cells.cell(operations.operation("attention"), shape, backends=contenders(shape))
            for shape in shapes
        ],
        "others": list(grid_cells.others()),
        "ssd": [lambda case=case: grid_cells.scan_cell(case, CHUNKS) for case in grid_cells.scans()],
    }


def contenders(shape: Shape) -> list[str]:
    """Backends that may be the fastest. In the rows of 2026-11-23 and 24 Flex is behind cuDNN wherever both can serve, by a third,
    and behind FlashAttention-2 at a head_dim above 128, by as much; varlen is sdpa:flash where there are neither documents nor
    a window."""
    public = {"sdpa:cudnn": spec.refuse_sdpa_cudnn, "sdpa:flash": spec.refuse_sdpa_flash, "varlen": spec.refuse_varlen}
    able = [name for name, refuse in public.items() if refuse(shape.spec, None) is None]
    if shape.spec.plain:
        able.remove("varlen")
    wide = shape.spec.head_dim > 128
    return ["triton", *able, *["flex"] * ("sdpa:cudnn" not in able and not (wide and able))]


@dataclass(frozen=True)
class Task:
    """One contender of one cell. operation, at: the cell's place in `makers` of `drawn`."""

    operation: str
    at: int
    label: str
    name: str
    drawn: Drawn = None

    @property
    def compiles(self) -> bool:
        return not self.name.startswith(("sdpa", "varlen", "aten"))

    @property
    def code(self) -> tuple[str, str]:
        """The cell and contender of what is compiled: mamba_ssm's kernels are those of any number of heads and groups, and of any
        length."""
        cell = re.sub(r"^ssd \d+x|, \d+ groups.*", "", self.label) if self.name.startswith("mamba_ssm") else self.label
        return cell, self.name


def tasks(
    only: list[str], backends: list[str] | None, match: str, done: set[tuple[str, ...]], drawn: Drawn = None
) -> list[Task]:
    """Tasks that are wanted and not measured yet, in order of value. A backend's first word names all of it (mamba_ssm)."""
    found = []
    for operation, makes in makers(drawn).items():
        for at, make in enumerate(makes if operation in only else []):
            cell = make()
            if match in cell.label:
                found += [
                    Task(operation, at, cell.label, one.name, drawn)
                    for one in cell.contenders()
                    if (backends is None or one.name.split()[0] in backends)
                    and (operation, one.name) != ("ssd", "reference")  # compiles for long, and is far behind
                    and (cell.operation, cell.name, str(cell.seq_len), one.name) not in done
                ]
    return found


def compile_all(wanted: list[Task], seconds: float, workers: int) -> set[Task]:
    """Compile in processes side by side. Returns what is in the caches when the time is over."""
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    others = active_children()
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    futures: dict[Future[None], tuple[str, str]] = {}
    for task in wanted:
        if not task.compiles or task.code in futures.values():
            continue
        for share in range(SHARES) if task.name.startswith("mamba_ssm") else [None]:
            futures[pool.submit(_compile, task, share)] = task.code
    done, left = wait(futures, seconds)
    for code, error in {futures[future]: future.exception() for future in done if future.exception()}.items():
        print(f"{' '.join(code)} did not compile: {error!r}"[:200], flush=True)  # its measurement will say so again
    if left:
        print(f"compiled {len(done)} of {len(futures)} parts; what is left is not measured", flush=True)
        for process in active_children():
            if process not in others:
                process.terminate()
    pool.shutdown(cancel_futures=True)
    unfinished = {futures[future] for future in left}
    return {task for task in wanted if task.code not in unfinished}


_MAKERS: dict[str, Makers] = {}


def _compile(task: Task, share: int | None) -> None:
    import torch

    if not _MAKERS:
        _MAKERS.update(makers(task.drawn))
    cell = _MAKERS[task.operation][task.at]()
    one = next(c for c in cell.contenders() if c.name == task.name)
    if share is not None:
        assert one.warm is not None
        one.warm(share, SHARES)
    else:
        leaves, up = cell.inputs(0)
        run_both(one.make(), leaves, up)
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def measure_all(wanted: list[Task], until: float, write: Callable[[dict[str, Any]], None], drawn: Drawn = None) -> None:
    """Rows of every task, cell by cell, up to a time of time.perf_counter."""
    import torch

    facts = {"device": platform.detect().device_name, "date": datetime.date.today().isoformat(), "commit": commit()}
    built = makers(drawn)
    by_cell = itertools.groupby(wanted, key=lambda task: (task.operation, task.at))
    for (operation, at), group in by_cell:
        if time.perf_counter() > until:
            print("out of time; the same command again measures the rest", flush=True)
            return
        cell, names = built[operation][at](), {task.name for task in group}
        chosen = [one for one in cell.contenders() if one.name in names]
        try:
            results = measure(cell, chosen, Ceilings(1.0, 1.0), rep_ms=REP_MS)
        except torch.OutOfMemoryError as error:
            print(f"{cell.label}: {error}"[:150], flush=True)
            results = []
        for one in results:
            numbers = {"forward_ms": one.forward_ms, "backward_ms": one.backward_ms, "wall_ms": one.wall_ms}
            row: dict[str, Any] = {"operation": one.operation, "cell": one.cell, "seq_len": one.seq_len}
            row |= {"backend": one.backend, "failed": one.failed or ""} | facts
            row |= {name: "" if one.failed else f"{ms:.4f}" for name, ms in numbers.items()}
            row["error"] = "" if one.failed else f"{one.error:.2e}"
            write(row)
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--only", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--backends", nargs="+", help="by their first word, such as triton, sdpa:cudnn, mamba_ssm")
    parser.add_argument("--match", default="", help="only cells whose label has this in it")
    parser.add_argument("--drawn", type=positive, nargs=2, metavar=("COUNT", "SEED"), help="drawn shapes alone")
    parser.add_argument("--seconds", type=number, default=400, help="no measurement begins after them")
    parser.add_argument("--peer-path", type=Path, metavar="FOLDER", help="where mamba_ssm and causal_conv1d lie")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse(argv)
    began, workers = time.perf_counter(), min(15, len(os.sched_getaffinity(0)))
    if args.peer_path is not None:
        add_peers(args.peer_path)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(sys.path))  # for the processes that compile
    done: set[tuple[str, ...]] = set()
    if args.out.exists():
        done = {tuple(row[name] for name in COLUMNS[:4]) for row in csv.DictReader(args.out.open())}
    drawn = tuple(args.drawn) if args.drawn else None
    wanted = tasks(["attention"] if drawn else args.only, args.backends, args.match, done, drawn)
    print(f"{len(wanted)} rows to measure", flush=True)
    ready = compile_all(wanted, 0.55 * args.seconds, workers)
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()

        def write(row: dict[str, Any]) -> None:
            writer.writerow(row)
            file.flush()
            print(", ".join(str(row[name]) for name in COLUMNS[:8]), row["failed"], flush=True)

        measure_all([task for task in wanted if task in ready], began + args.seconds, write, drawn)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 0
