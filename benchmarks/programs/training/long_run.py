"""A long run: speed, memory of the GPUs and of each process over its time, and how much they have drifted.

    python -m benchmarks long_run FILE [a.b=c …] --out FOLDER [--minutes 20] [--nproc 2] [--every 15]

FILE is trained by `llmtrain train` into FOLDER/run, whose metrics.jsonl has the figures of each step. So many minutes after its
second step it is asked to save and end (SIGTERM), unless its duration has ended it before. Every `--every` seconds a line is
added to FOLDER/looks.jsonl: each GPU by nvidia-smi, and resident memory of each rank. At the end FOLDER gets long-run.png and
long-run.json. The exit status is that of a run that ended too early, or 0.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.pictures import picture
from benchmarks.harness.report import metric_rows
from llmtrain.distributed.processes import exit_on_sigterm
from llmtrain.errors import Preempted
from llmtrain.schema.load import load_config

STEP = "throughput/step_seconds"
MEMORY = {name: f"memory/{name}_gib" for name in ("allocated", "reserved", "peak_allocated")}
BUSY = "step/gpu_busy"
GPU = ("index", "memory.used", "utilization.gpu", "clocks.sm", "power.draw", "temperature.gpu")
MINUTES = (2, 10, 20)
"""Minutes after the first measured step of which the summary tells memory, and the end."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=number, default=20)
    parser.add_argument("--nproc", type=positive, default=2)
    parser.add_argument("--every", type=number, default=15, help="seconds between two looks at GPUs and processes")
    args = parser.parse(argv)
    settings = [args.file, *args.overrides, f"run_dir={args.out / 'run'}"]
    tokens = load_config(args.file, args.overrides).tokens_per_step
    args.out.mkdir(parents=True, exist_ok=True)
    exit_on_sigterm()  # else the run would outlive it
    command = [sys.executable, "-m", "llmtrain.cli", "train", *settings, "--nproc", str(args.nproc)]
    with (args.out / "run.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        asked = watch(process, args.out, 60 * args.minutes, args.every)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        status = process.wait()
    report(args.out, tokens)
    return 0 if status == 0 or (asked and status == Preempted.status) else status


def watch(process: subprocess.Popen, out: Path, seconds: float, every: float) -> bool:
    """Look until the process has ended. Returns whether it was asked to, `seconds` after its second step."""
    began, first, looked, asked = time.monotonic(), None, -every, False
    with (out / "looks.jsonl").open("w", buffering=1, encoding="utf-8") as looks:
        while process.poll() is None:
            now = time.monotonic() - began
            rows = metric_rows(out / "run" / "metrics.jsonl", STEP)
            if first is None and rows:
                first = now
            if now - looked >= every:
                looked = now
                resident = by_role(process.pid, processes_of(process.pid))
                row = {"seconds": now, "step": rows[-1]["step"] if rows else 0, "gpus": gpus(), "rss_mib": resident}
                looks.write(json.dumps(row) + "\n")
            if first is not None and now - first >= seconds and not asked:
                asked = True
                process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
    return asked


def gpus() -> list[Row]:
    """Figures of each GPU of this process by nvidia-smi; none where it is not there or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found: list[Row] = [dict(zip(GPU, map(cell, line.split(",")), strict=True)) for line in lines]
    return [one for one in found if visible is None or f"{one['index']:.0f}" in visible.split(",")]


def cell(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # [N/A]


def processes_of(session: int) -> dict[int, tuple[int, float, str]]:
    """Parent, resident MiB and command of each process of a session by its id, from /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                mib = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20
                command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
                found[int(folder.name)] = int(fields[1]), mib, command
    return found


def by_role(launcher: int, found: Mapping[int, tuple[int, float, str]]) -> dict[str, float]:
    """Resident MiB of the launcher, of each rank, of what each rank has started, and of compilers."""
    ranks = sorted(pid for pid, (parent, _, _) in found.items() if parent == launcher)
    total = dict[str, float]()
    for pid, (parent, mib, command) in found.items():
        if pid == launcher:
            what = "launcher"
        elif pid in ranks:
            what = f"rank {ranks.index(pid)}"
        elif "compile_worker" in command or parent not in ranks:
            what = "compiler"
        else:
            what = f"of rank {ranks.index(parent)}"  # loader processes, and others that Python forks
        total[what] = total.get(what, 0.0) + mib
    return dict(sorted(total.items()))


def report(out: Path, tokens: int) -> None:
    """Write long-run.json and long-run.png, and print the former. tokens: of a step."""
    steps, looks = metric_rows(out / "run" / "metrics.jsonl", STEP), metric_rows(out / "looks.jsonl")
    if len(steps) < 8:
        print("fewer than eight steps", flush=True)
        return
    text = json.dumps(summary(steps, looks, tokens), indent=1) + "\n"
    (out / "long-run.json").write_text(text)
    print(text, end="", flush=True)
    with picture(out / "long-run.png", 4, 1, size=(9, 9), sharex=True) as panels:
        draw(panels, steps, looks, tokens)


def ends(steps: Sequence[Row]) -> list[float]:
    """Seconds of training until the end of each step, from that of the first one here."""
    return list(itertools.accumulate((row[STEP] for row in steps[1:]), initial=0.0))


def since_first(looks: Sequence[Row]) -> list[tuple[float, Row]]:
    """Looks from the first measured step on, with the seconds since."""
    found = [look for look in looks if look["step"]]
    return [(look["seconds"] - found[0]["seconds"], look) for look in found]


def summary(steps: Sequence[Row], looks: Sequence[Row], tokens: int) -> Row:
    """Medians of the quarters of the run's time, and memory after 2, 10 and 20 minutes and at the end."""
    times, speeds = ends(steps), [tokens / row[STEP] for row in steps]
    cuts = [k * times[-1] / 4 for k in range(5)]
    parts = [
        [speed for t, speed in zip(times, speeds, strict=True) if a <= t <= b] for a, b in itertools.pairwise(cuts)
    ]
    quarters, memory = [statistics.median(part) for part in parts if part], {}
    of_step, seen = {row["step"]: row for row in steps}, since_first(looks)
    for name, when in [*((f"minute {minute}", 60.0 * minute) for minute in MINUTES), ("end", float("inf"))]:
        if seen and (name == "end" or seen[-1][0] >= when - 30):
            look = max((one for one in seen if one[0] <= when), key=lambda one: one[0])[1]
            row = of_step.get(look["step"], {})
            found: Row = {f"{key}_gib": round(row[field], 3) for key, field in MEMORY.items() if field in row}
            resident = {role: mib for role, mib in look["rss_mib"].items() if role != "compiler"}
            memory[name] = found | {"gpu_used_mib": [one["memory.used"] for one in look["gpus"]], "rss_mib": resident}
    return {
        "steps": len(steps),
        "seconds": round(times[-1], 1),
        "tokens_per_second": round(statistics.median(speeds)),
        "quarters": [round(value) for value in quarters],
        "last_over_first_quarter": round(quarters[-1] / quarters[0], 4),
        "slowest_steps": sorted((round(row[STEP], 2) for row in steps), reverse=True)[:8],
        "gpu_busy": [round(row[BUSY], 3) for row in steps if BUSY in row],
        "memory": memory,
    }


def draw(panels: Sequence[Any], steps: Sequence[Row], looks: Sequence[Row], tokens: int) -> None:
    speed, memory, host, busy = panels
    minutes, seen = [t / 60 for t in ends(steps)], since_first(looks)
    speed.plot(minutes, [tokens / row[STEP] / 1e3 for row in steps], ".", markersize=2)
    for name, field in MEMORY.items():
        memory.plot(minutes, [row.get(field) for row in steps], label=f"{name.replace('_', ' ')}, rank 0")
    for index in sorted({one["index"] for _, look in seen for one in look["gpus"]}):
        rows = [(t / 60, one) for t, look in seen for one in look["gpus"] if one["index"] == index]
        at = [t for t, _ in rows]
        memory.plot(at, [(one["memory.used"] or 0) / 1024 for _, one in rows], "--", label=f"GPU {index:.0f}")
        share = [(one["utilization.gpu"] or 0) / 100 for _, one in rows]
        busy.plot(at, share, label=f"GPU {index:.0f}, nvidia-smi")
    for role in sorted({role for _, look in seen for role in look["rss_mib"]} - {"compiler"}):
        rows = [(t / 60, look["rss_mib"][role] / 1024) for t, look in seen if role in look["rss_mib"]]
        host.plot(*zip(*rows, strict=True), label=role)
    of_busy = [(t, row[BUSY]) for t, row in zip(minutes, steps, strict=True) if BUSY in row]
    busy.plot([t for t, _ in of_busy], [share for _, share in of_busy], "ko", markersize=3, label=f"{BUSY}, rank 0")
    busy.set_xlabel("minutes of training")
    labels = ("thousand tokens/s", "GPU memory, GiB", "resident, GiB", "share of time at work")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=3)
