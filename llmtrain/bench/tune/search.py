"""The search itself: compile candidates side by side, drop what fails or is wrong, time the rest, name the winners."""

import contextlib
import datetime
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain.bench.tune.compiling import Compilers, Task
from llmtrain.bench.tune.measuring import Measured
from llmtrain.kernels.platform import Platform, shared_limit
from llmtrain.kernels.search import Attempt, Search, Winner
from llmtrain.kernels.tuning_table import KERNELS, Row
from llmtrain.progress import CountBar

Step = Callable[[], None]
"""To be called after each candidate."""


def compile_candidates(
    operation: str, case: dict[str, Any], one: Search, parts: Sequence[str], where: Platform, quick: bool,
    workers: int, bar: Callable[[str, int], contextlib.AbstractContextManager[Step]],
) -> dict[str, list[Attempt]]:  # fmt: skip
    """Compile all candidates of all parts, in processes that need no GPU. bar: (title, length) -> a context that gives a Step."""
    attempts = [Attempt(part, launch) for part in parts for launch in one.candidates(part, quick)]
    tasks = [Task(operation, case, one.part, one.launch, where.arch) for one in attempts]
    limit = shared_limit(where.arch)
    with bar("compiling", len(tasks)) as step, Compilers(workers, timeout_s=90) as compilers:
        for i, compiled in compilers.results(tasks):
            attempts[i].shared, attempts[i].problem = compiled.shared, compiled.problem(limit)
            step()
    return {part: [one for one in attempts if one.part == part] for part in parts}


def measure(
    attempts: dict[str, list[Attempt]],
    measurer: Callable[[str, dict[str, Any]], Measured],
    bar: Callable[[str, int], contextlib.AbstractContextManager[Step]],
) -> dict[str, list[Attempt]]:
    """Measures what compiled. Returns the attempts that may win, per part, fastest first."""
    able = [one for ones in attempts.values() for one in ones if one.problem is None]
    with bar("measuring", len(able)) as step:
        for one in able:
            found = measurer(one.part, one.launch)
            one.ms, one.error, one.problem = found.ms, found.error, found.problem
            step()
    return {
        part: sorted((one for one in ones if one.problem is None), key=lambda one: one.ms)
        for part, ones in attempts.items()
    }


def row(winner: Winner, one: Search, where: Platform, seq_len: int | None, variant: str | None) -> Row:
    """Row of the winner, with its provenance."""
    scale = {"tflops": 1e12, "gbps": 1e9}[winner.unit]
    measured = {
        "device": where.device_name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "ms": round(winner.ms, 4),
        winner.unit: round(winner.work / winner.ms * 1e3 / scale, 1),
    }
    shape = tuple(getattr(one.spec, name) for name in KERNELS[winner.kernel].shape)
    return Row(winner.kernel, one.spec.dtype, shape, winner.launch, winner.shared, measured, seq_len, variant)


def commit() -> str:
    """Commit of the code that runs, with `+` if it was changed since; `unknown` without git."""

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def shared_of(operation: str, case: dict[str, Any], launch: Any, where: Platform) -> int:
    """Bytes of shared memory of a whole Launch, by compiling it."""
    with Compilers(1) as compilers:
        task = Task(operation, case, "whole", asdict(launch), where.arch)
        return next(compilers.results([task]))[1].shared


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Step]:
    """Progress bar on standard error, with the time left; a line at the end where that is no terminal."""
    with CountBar(sys.stderr.isatty(), total, f"{title:<10}") as bar:
        yield bar.advance
    if not bar.shown:
        print(f"{title}: {total} done", file=sys.stderr)
