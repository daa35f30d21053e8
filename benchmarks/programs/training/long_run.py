"""A long run: speed, memory of the GPUs and of each process over its time, and how much they have drifted.

    python -m benchmarks long_run FILE [a.b=c …] --out FOLDER [--minutes 20] [--nproc 2] [--every 15]

FILE is trained by `llmtrain train` into FOLDER/run. So many minutes after its second step it is asked to save and end (SIGTERM),
unless its duration has ended it before. FOLDER gets steps.csv (metrics of each step, and when it was written),
gpus.csv (nvidia-smi) and processes.csv (resident memory), both every `--every` seconds, and at the end
long-run.png and long-run.json. The exit status is that of a run that ended too early, or 0.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.pictures import picture
from benchmarks.harness.report import metric_rows
from llmtrain.distributed.processes import exit_on_sigterm
from llmtrain.errors import Preempted
from llmtrain.schema.load import load_config

STEP = "throughput/step_seconds"
METRICS = {
    "step_seconds": STEP,
    "data_wait_seconds": "throughput/data_wait_seconds",
    "allocated_gib": "memory/allocated_gib",
    "reserved_gib": "memory/reserved_gib",
    "peak_gib": "memory/peak_allocated_gib",
    "gpu_busy": "step/gpu_busy",
    "communication": "step/communication",
    "gaps": "step/gaps",
    "loss": "loss/train/cross_entropy",
}
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
    (args.out / "what.json").write_text(json.dumps({"tokens_per_step": tokens, "settings": settings}))
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
    report(args.out)
    return 0 if status == 0 or (asked and status == Preempted.status) else status


def watch(process: subprocess.Popen, out: Path, seconds: float, every: float) -> bool:
    """Write what there is to see until the process has ended. Returns whether it was asked to, `seconds` after its second step."""
    began, first, asked = time.monotonic(), None, False
    seen, looked = 0, -every
    with Sheets(out) as sheets:
        while process.poll() is None:
            now = time.monotonic() - began
            rows = metric_rows(out / "run" / "metrics.jsonl", STEP)
            for row in rows[seen:]:
                first = now if first is None else first
                sheets.steps.writerow([f"{now:.1f}", row["step"], *(row.get(name, "") for name in METRICS.values())])
            seen = len(rows)
            if now - looked >= every:
                looked = now
                look(sheets, process.pid, now)
            if first is not None and now - first >= seconds and not asked:
                asked = True
                process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
    return asked


class Sheets(contextlib.ExitStack):
    """The three CSV files, opened anew; every row is written as it comes."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        heads = {"steps": ("step", *METRICS), "gpus": GPU, "processes": ("what", "pid", "rss_mib")}
        self.steps, self.gpus, self.processes = (self._sheet(out / f"{name}.csv", heads[name]) for name in heads)

    def _sheet(self, file: Path, head: Sequence[str]) -> Any:
        writer = csv.writer(self.enter_context(file.open("w", buffering=1, newline="", encoding="utf-8")))
        writer.writerow(["seconds", *head])
        return writer


def look(sheets: Sheets, launcher: int, now: float) -> None:
    """One line for each GPU and for each process of the run."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for line in said(["nvidia-smi", f"--query-gpu={','.join(GPU)}", "--format=csv,noheader,nounits"]):
        values = [value.strip() for value in line.split(",")]
        if visible is None or values[0] in visible.split(","):
            sheets.gpus.writerow([f"{now:.1f}", *values])
    for what, pid, mib in roles(launcher, processes_of(launcher)):
        sheets.processes.writerow([f"{now:.1f}", what, pid, f"{mib:.0f}"])


def said(command: Sequence[str]) -> list[str]:
    """Lines of a program's output; none where it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


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


def roles(launcher: int, found: dict[int, tuple[int, float, str]]) -> list[tuple[str, int, float]]:
    """Role, id and resident MiB of processes: the launcher, its ranks, what ranks have started, and compilers."""
    ranks = sorted(pid for pid, (parent, _, _) in found.items() if parent == launcher)
    named = []
    for pid, (parent, mib, command) in found.items():
        if pid == launcher:
            what = "launcher"
        elif pid in ranks:
            what = f"rank {ranks.index(pid)}"
        elif "compile_worker" in command or parent not in ranks:
            what = "compiler"
        else:
            what = f"of rank {ranks.index(parent)}"  # loader processes, and others that Python forks
        named.append((what, pid, mib))
    return named


def report(out: Path) -> int:
    """Write long-run.json and long-run.png of what is there so far, and print the former."""
    what = json.loads((out / "what.json").read_text())
    steps, gpus, processes = (read(out / f"{name}.csv") for name in ("steps", "gpus", "processes"))
    if len(steps) < 8:
        print("fewer than eight steps yet", flush=True)
        return 0
    found = summary(steps, gpus, processes, what["tokens_per_step"])
    (out / "long-run.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1), flush=True)
    with picture(out / "long-run.png", 4, 1, size=(9, 9), sharex=True) as panels:
        draw(panels, steps, gpus, processes, what["tokens_per_step"])
    return 0


def read(path: Path) -> list[Row]:
    """Rows with numbers as such; what is empty or no number is left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values()]  # the last may be cut off
    return [{name: value for name, text in row.items() if (value := cell(text)) is not None} for row in rows]


def cell(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text if text and not text.startswith("[") else None  # [N/A]


def summary(steps: Sequence[Row], gpus: Sequence[Row], processes: Sequence[Row], tokens: int) -> Row:
    """Medians of the quarters of the run's time, and memory after 2, 10 and 20 minutes and at the end."""
    begin, end = steps[0]["seconds"], steps[-1]["seconds"]
    cuts = [begin + k * (end - begin) / 4 for k in range(5)]
    parts = [[row for row in steps if a <= row["seconds"] <= b] for a, b in itertools.pairwise(cuts)]
    quarters = [statistics.median(tokens / row["step_seconds"] for row in part) for part in parts if part]
    times = [(f"minute {minute}", begin + 60 * minute) for minute in MINUTES if begin + 60 * minute <= end + 30]
    roles = sorted({row["what"] for row in processes if row["what"] != "compiler"})
    memory = {}
    for name, when in [*times, ("end", end)]:
        step = max((row for row in steps if row["seconds"] <= when), key=lambda row: row["seconds"])
        found: Row = {key: round(step[key], 3) for key in ("allocated_gib", "reserved_gib", "peak_gib") if key in step}
        found["gpu_used_mib"] = [row.get("memory.used") for row in at(gpus, when)]
        found["rss_mib"] = dict.fromkeys(roles, 0.0)
        for row in at(processes, when):
            if row["what"] in roles:
                found["rss_mib"][row["what"]] += row["rss_mib"]
        memory[name] = found
    return {
        "steps": len(steps),
        "seconds": round(end - begin, 1),
        "tokens_per_second": round(statistics.median(tokens / row["step_seconds"] for row in steps)),
        "quarters": [round(value) for value in quarters],
        "last_over_first_quarter": round(quarters[-1] / quarters[0], 4),
        "slowest_steps": sorted((round(row["step_seconds"], 2) for row in steps), reverse=True)[:8],
        "gpu_busy": [round(row["gpu_busy"], 3) for row in steps if "gpu_busy" in row],
        "memory": memory,
    }


def at(rows: Sequence[Row], when: float) -> list[Row]:
    """Rows of the last look by then, or of the first one."""
    if not rows:
        return []
    seconds = max((row["seconds"] for row in rows if row["seconds"] <= when), default=rows[0]["seconds"])
    return [row for row in rows if row["seconds"] == seconds]


def draw(
    panels: Sequence[Any], steps: Sequence[Row], gpus: Sequence[Row], processes: Sequence[Row], tokens: int
) -> None:
    speed, memory, host, busy = panels

    def minutes(rows: Sequence[Row]) -> list[float]:
        return [(row["seconds"] - steps[0]["seconds"]) / 60 for row in rows]

    speed.plot(minutes(steps), [tokens / row["step_seconds"] / 1e3 for row in steps], ".", markersize=2)
    speed.set_ylabel("thousand tokens/s")
    for name, label in (("allocated_gib", "allocated"), ("reserved_gib", "reserved"), ("peak_gib", "peak allocated")):
        rows = [row for row in steps if name in row]
        memory.plot(minutes(rows), [row[name] for row in rows], label=f"{label}, rank 0")
    for index in sorted({row["index"] for row in gpus}):
        rows = [row for row in gpus if row["index"] == index and {"memory.used", "utilization.gpu"} <= set(row)]
        memory.plot(minutes(rows), [row["memory.used"] / 1024 for row in rows], "--", label=f"GPU {index:.0f}")
        busy.plot(minutes(rows), [row["utilization.gpu"] / 100 for row in rows], label=f"GPU {index:.0f}, nvidia-smi")
    memory.set_ylabel("GPU memory, GiB")
    for role in sorted({row["what"] for row in processes if row["what"] != "compiler"}):
        looks: dict[float, float] = {}
        for row in processes:
            if row["what"] == role:
                looks[row["seconds"]] = looks.get(row["seconds"], 0) + row["rss_mib"]
        host.plot(
            [(when - steps[0]["seconds"]) / 60 for when in looks], [mib / 1024 for mib in looks.values()], label=role
        )
    host.set_ylabel("resident, GiB")
    rows = [row for row in steps if "gpu_busy" in row]
    busy.plot(minutes(rows), [row["gpu_busy"] for row in rows], "ko", markersize=3, label="step/gpu_busy, rank 0")
    busy.set_ylabel("share of time at work")
    busy.set_xlabel("minutes of training")
    for axes in (speed, memory, host, busy):
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7, ncols=3)
