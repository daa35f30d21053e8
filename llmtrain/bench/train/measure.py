"""One run of a sweep: started, watched until it has made its steps, and ended."""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.bench.train.cases import Case
from llmtrain.bench.train.sweep import Sweep
from llmtrain.config.output_folder import OutputError, is_marked, make_marked
from llmtrain.train.resolved import read_resolved

_POLL_SECONDS = 0.5
_STEP = "throughput/step_seconds"


_TERMINATED = threading.Event()


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end this process by SystemExit, and before that the run that `measure` watches, a session of its own, which the
    signal does not reach. The handler raises nothing itself, which might be while a run starts."""
    before = signal.signal(signal.SIGTERM, lambda *_: _TERMINATED.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _TERMINATED.clear()


def measure(case: Case, sweep: Sweep) -> dict[str, Any]:
    """Figures of a case, or `error`, the end of what the run said, which stays in RUN.txt; the run's folder is removed again."""
    folder = Path(case.config.run_dir)
    if is_marked(folder):  # of a sweep that was killed
        shutil.rmtree(folder)
    try:
        make_marked(folder)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error}") from error
    said = folder.parent / f"{folder.name}.txt"
    settings = [*case.settings, "--nproc", str(case.gpus)]
    command = [sys.executable, "-P", "-m", "llmtrain.cli", "train", case.model, *settings]
    began = time.monotonic()
    with said.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            rows = _watch(process, folder / "metrics.jsonl", sweep.warmup + sweep.steps, began + sweep.timeout)
        finally:
            _end(process)
    if len(rows) < sweep.warmup + sweep.steps:
        last = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        why = "" if process.returncode != -signal.SIGKILL else f"not finished after {sweep.timeout} s: "
        return {"error": why + "\n".join(last)}
    found = figures(rows[sweep.warmup :], case, read_resolved(folder))
    shutil.rmtree(folder, ignore_errors=True)
    return found


def figures(rows: list[dict[str, float]], case: Case, resolved: dict[str, Any]) -> dict[str, Any]:
    """rows: the metrics of each measured step. resolved: what was left to the run (train/resolved.py)."""
    train = case.config.train
    seconds = statistics.median(row[_STEP] for row in rows)
    rate = case.config.tokens_per_step / seconds
    scale = (
        rate / case.gpus / rows[-1]["throughput/tokens_per_second_per_device"]
    )  # the run's own are of a moving window
    return {
        "step_seconds": seconds,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / case.gpus,
        "mfu": _scaled(rows[-1].get("throughput/mfu_foundry"), scale),
        "hfu": _scaled(rows[-1].get("throughput/hfu"), scale),
        "peak_gib": rows[-1].get("memory/peak_allocated_gib"),
        "microbatch_size": resolved["microbatch_size"],
        "grad_accum": case.config.grad_accum(case.gpus) * train.least_microbatch // resolved["microbatch_size"],
        "global_batch_size": train.global_batch_size,
        "sharding": resolved["sharding"]["strategy"],
        "checkpointing": resolved["activation_checkpointing"]["type"],
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _watch(process: subprocess.Popen, metrics: Path, steps: int, deadline: float) -> list[dict[str, float]]:
    """Metrics of the first `steps` steps that have a duration; fewer if the run ends or time is over."""
    rows: list[dict[str, float]] = []
    while len(rows) < steps and time.monotonic() < deadline:
        if _TERMINATED.is_set():
            sys.exit(143)
        ended = process.poll() is not None
        with contextlib.suppress(FileNotFoundError):
            *lines, _ = metrics.read_text(encoding="utf-8").split(
                "\n"
            )  # what follows the last line break is not complete
            rows = [row for row in map(json.loads, lines) if _STEP in row]
        if ended:
            break
        time.sleep(_POLL_SECONDS)
    return rows[:steps]


def _end(process: subprocess.Popen) -> None:
    """Kill a run and all of its ranks: there is nothing to save."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
