"""Seconds from a killed rank to the end of the next step, on this machine: `llmtrain train --max-restarts` and `kill -9`.

    python scripts/restart_times.py [FILE] [a.b=c ...] [--nproc 2] [--kills 20] [--device cpu|cuda] [--seconds 300] [--limit S]

Without FILE it is the quickstart. Each rank is killed in turn, as soon as the run has saved after a start; it has to go on from
that checkpoint or a newer one. The last line is a row for benchmarks/results/training/restarts.json. Exit status 1 if a restart
failed or took too long.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from llmtrain.commands.processes import count_gpus
from llmtrain.distributed.processes import exit_on_sigterm

SETTINGS = (
    *("train.duration=1000000 steps", "checkpoint.interval=10 steps", "eval.interval=1000000 steps"),
    *("logging.wandb=null", "logging.tensorboard=false"),
)
"""A run that does not end, and saves soon."""
CHECKPOINTS = "checkpoints/step-*[0-9]/manifest.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="quickstart", help="a YAML, or its name (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="of one start, at most")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no rank is killed any more")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs where there are any")
    args = parser.parse_intermixed_args()
    exit_on_sigterm()  # so that the run below ends too
    environment, found = dict(os.environ), list[float]()
    if args.device == "cpu":
        environment |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    elif args.device == "cuda" and not count_gpus():
        parser.error("--device cuda: PyTorch finds no GPU here")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run_dir = Path(folder) / "run"
        settings = [*SETTINGS, *args.overrides, f"run_dir={run_dir}"]
        if args.file == "quickstart":
            settings.insert(0, f"train.microbatch_size={max(8 // args.nproc, 1)}")
        command = [sys.executable, "-m", "llmtrain.cli", "train", args.file, *settings]
        command += ["--nproc", str(args.nproc), "--max-restarts", str(args.kills)]
        log_file = Path(folder) / "log"
        with log_file.open("w") as log:
            run = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            for seconds in measure(run, run_dir, log_file, args):
                found.append(seconds)
        except (TimeoutError, ChildProcessError) as error:
            print(f"{error}\n{log_file.read_text()[-4000:]}")
            return 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            if found:
                print(json.dumps(row(args, sorted(found))))
    return 0


def row(args: argparse.Namespace, found: list[float]) -> dict[str, object]:
    return {
        "what": f"{args.file}, {args.nproc} ranks, {len(found)} kills",
        "median_s": round(statistics.median(found), 1),
        "least_s": round(found[0], 1),
        "most_s": round(found[-1], 1),
    }


def measure(run: subprocess.Popen, run_dir: Path, log: Path, args: argparse.Namespace) -> Iterator[float]:
    """Seconds of each restart. Raises TimeoutError for one that takes too long, ChildProcessError where the launcher ended, or the
    ranks went on from an older checkpoint than there was."""
    end = time.monotonic() + args.limit
    first = await_change(run, run_dir, "start.json", 0, args.seconds)
    for number in range(args.kills):
        await_change(run, run_dir, CHECKPOINTS, first, args.seconds)
        if time.monotonic() > end:
            return
        rank, saved, read = number % args.nproc, newest(run_dir), log.stat().st_size
        began = time.monotonic()
        os.kill(rank_processes(run.pid)[rank], signal.SIGKILL)
        first = await_change(run, run_dir, "start.json", first, args.seconds)
        seconds = time.monotonic() - began
        parts = json.loads((run_dir / "start.json").read_text())["parts"]
        longest = ", ".join(f"{some:.1f} s {name}" for name, some in list(parts.items())[:6])
        print(
            f"kill {number + 1}, of rank {rank}, after the save of step {saved}: {seconds:.1f} s ({longest})",
            flush=True,
        )
        resumed = re.findall(r"resumed from \S+ \(step (\d+)", log.read_bytes()[read:].decode(errors="replace"))
        if [int(step) < saved for step in resumed] != [False]:
            raise ChildProcessError(f"step {saved} was saved, and the ranks went on from {resumed or 'the beginning'}")
        yield seconds


def newest(run_dir: Path) -> int:
    """Step of the newest complete checkpoint."""
    return max(int(path.parent.name.removeprefix("step-")) for path in run_dir.glob(CHECKPOINTS))


def rank_processes(launcher: int) -> dict[int, int]:
    """The process of each rank that a launcher runs. It has other children, such as the one that compiles kernels."""
    found = dict[int, int]()
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has ended
            if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes()):
                found[int(rank[1])] = int(child)
    return found


def await_change(run: subprocess.Popen, run_dir: Path, pattern: str, before: int, seconds: float) -> int:
    """The time of the newest change of a file, in nanoseconds, once it is after `before`."""
    deadline = time.monotonic() + seconds
    while True:
        if run.poll() is not None:
            raise ChildProcessError(f"the launcher ended with status {run.returncode}")
        for path in run_dir.glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
                if (changed := path.stat().st_mtime_ns) > before:
                    return changed
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_dir / pattern} did not change in {seconds:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
