"""The verb `llmtrain bench kernels`: compile everything in parallel, then measure one contender after the other."""

import argparse
import contextlib
import datetime
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from llmtrain.bench.kernels import report
from llmtrain.bench.kernels.cell import Cell, Contender, cells
from llmtrain.bench.kernels.measure import Result, ceilings, measure
from llmtrain.bench.tune.search import commit, progress
from llmtrain.config.output_folder import unwritable_reason
from llmtrain.errors import UserError
from llmtrain.kernels import operation, platform

OPERATIONS = tuple(one.title for one in operation.operations())
SHARES = 8  # into which the compilation of an autotuned public kernel is cut


def run(args: argparse.Namespace) -> int:
    """Raises UserError for a request that makes no sense. 1 if one of our kernels failed."""
    began = time.perf_counter()
    here = platform.detect()
    tiny = here.vendor == "cpu"
    if args.peer_path is not None:
        if not args.peer_path.is_dir():
            raise UserError(f"--peer-path {args.peer_path} is no folder; name the one in which mamba_ssm/ lies")
        add_peers(args.peer_path)
    found = chosen(args, tiny)
    if not args.compile_only and (reason := unwritable_reason(args.out)):
        raise UserError(f"--out {args.out}: {reason}")
    if tiny:
        print(
            "No GPU here: tiny shapes on the CPU's backends. Not measured: our kernels, memory, public peers, the bars."
        )
    else:
        warm(found, args)
    compiled = time.perf_counter() - began
    if args.compile_only:
        print(f"compiled in {compiled:.0f} s")
        return 0
    most = ceilings()
    import torch
    import triton

    words = " ".join(word for word in sys.argv[1:] if word not in ("bench", "kernels"))
    head = [
        f"{here.device_name}, torch {torch.__version__}, triton {triton.__version__}, commit {commit()}, "
        f"{datetime.date.today().isoformat()}. Medians; `llmtrain bench kernels {words}`.",
        f"Copy {most.bytes_s / 1e12:.2f} TB/s, matrix product {most.flops_s / 1e12:.0f} TFLOP/s. Ratio: to the best public "
        "backend, forward + backward.",
    ]
    drawn = {cell.operation: args.draws * cell.draws for cell in found}
    more = "".join(f", of {name} {count}" for name, count in drawn.items() if count > args.draws)
    head.append(
        f"Errors of ours and of public kernels: root mean squares over draws of the inputs: {args.draws}{more}."
    )
    print("\n".join(head), flush=True)
    facts: dict[str, Any] = {
        "device": here.device_name,
        "arch": here.arch,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "copy_bytes_s": most.bytes_s,
        "matmul_flops_s": most.flops_s,
    }
    done: list[tuple[Cell, list[Result]]] = []
    with progress("measuring", len(found)) as step:
        for cell in found:
            done.append((cell, measure(cell, cell.contenders(), most, args.draws)))
            report.write(args.out, head, facts, done)  # a time limit or a broken GPU must not cost what is measured
            step()
            if not tiny:
                torch.cuda.empty_cache()
    show(done)
    report.plot(args.out / "kernels.png", done)
    print(
        f"{args.out}/kernels.md, .json, .png; {time.perf_counter() - began:.0f} s, of which {compiled:.0f} s compiling"
    )
    return 1 if any(one.failed and not one.public for _, results in done for one in results) else 0


def chosen(args: argparse.Namespace, tiny: bool) -> list[Cell]:
    wanted = args.only or list(OPERATIONS)
    for name in wanted:
        if name not in OPERATIONS:
            raise UserError(f"nothing to measure in '{name}'; there is {', '.join(OPERATIONS)}")
    chunks = (256,) if args.quick else (128, 256)
    every = list(cells(tiny, chunks, wanted))
    lengths = args.seq_len or ([4096] if args.quick and not tiny else None)
    found = [cell for cell in every if lengths is None or cell.seq_len in lengths]
    found = [cell for cell in found if args.match is None or args.match in cell.label]
    if not found:
        raise UserError("no cell is left; there is:\n" + "\n".join(f"  {cell.label}" for cell in every))
    return found


def warm(cells: list[Cell], args: argparse.Namespace) -> None:
    """Compiles what the measurement will run, in processes side by side: it finds the code in the caches on disk.

    After --compile-seconds it stops: what is left is compiled when it is measured.
    """
    tasks: list[tuple[str, str, int]] = []
    public: set[tuple[str, str]] = set()
    for cell in cells:
        for one in cell.contenders():
            if one.warm is None:
                tasks.append((cell.label, one.name, -1))
            elif (cell.name, one.name) not in public:  # the same code at every length
                public.add((cell.name, one.name))
                tasks += [(cell.label, one.name, k) for k in range(SHARES)]
    tasks.sort(key=lambda task: task[2] < 0)  # the long ones first
    count = args.workers or min(14, len(os.sched_getaffinity(0)))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    os.environ.update(environment)
    others = active_children()
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (args.quick, args.peer_path))
    futures = [pool.submit(_warm, *task) for task in tasks]
    try:
        with progress("compiling", len(tasks)) as step:
            for future in as_completed(futures, args.compile_seconds):
                # Whatever fails here fails again, and says so, when it is measured.
                with contextlib.suppress(Exception):
                    future.result()
                step()
    except TimeoutError:
        done = sum(future.done() for future in futures)
        print(f"compiled {done} of {len(tasks)} parts in {args.compile_seconds:g} s; the rest when it is measured")
        for process in active_children():
            if process not in others:
                process.terminate()
    pool.shutdown(cancel_futures=True)
    del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]


_CELLS: dict[str, Cell] = {}


def _begin(quick: bool, peers: Path | None) -> None:
    if peers is not None:
        add_peers(peers)
    every = argparse.Namespace(only=None, quick=quick, seq_len=None, match=None)
    _CELLS.update({cell.label: cell for cell in chosen(every, tiny=False)})


def _warm(label: str, name: str, share: int) -> None:
    import torch

    cell = _CELLS[label]
    one: Contender = next(c for c in cell.contenders() if c.name == name)
    if one.warm is not None:
        one.warm(share, SHARES)
    else:
        leaves, up = cell.inputs(0)
        operation.run_both(one.make(), leaves, up)
        torch.cuda.synchronize()
    torch.cuda.empty_cache()


def add_peers(folder: Path) -> None:
    """The folder, and each of its folders that is a checkout with a package in it (causal-conv1d/causal_conv1d)."""
    for path in (folder, *(child for child in folder.iterdir() if child.is_dir() and "-" in child.name)):
        sys.path.insert(0, str(path.resolve()))


def show(cells: list[tuple[Cell, list[Result]]]) -> None:
    """A table on a terminal, Markdown in a pipe."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(report.markdown([], cells))
        return
    table = Table(*report.COLUMNS, box=None, pad_edge=False)
    for row in report.table(cells):
        table.add_row(*row)
    console.print(table)
