"""Seconds from a killed rank to the end of the next step, on this machine: `llmtrain train --max-restarts` and `kill -9`.

    python scripts/restart_times.py [FILE] [a.b=c ...] [--nproc 2] [--kills 20] [--device cpu|cuda] [--seconds 300]

Without FILE it is the quickstart. Each rank is killed in turn, once the run has saved after a start. The last line is a row for
benchmarks/results/training/restarts.json. Exit status 1 if a restart failed or took too long.
"""

import argparse
import contextlib
import json
import os
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="quickstart", help="a YAML, or its name (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=300.0, help="of one start, at most")
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
        with (Path(folder) / "log").open("w") as log:
            run = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            for seconds in measure(run, run_dir, args):
                found.append(seconds)
            if (resumed := (Path(folder) / "log").read_text().count("resumed from")) != args.kills:
                raise ChildProcessError(f"{args.kills} starts, of which {resumed} resumed from a checkpoint")
        except (TimeoutError, ChildProcessError) as error:
            print(f"{error}\n{(Path(folder) / 'log').read_text()[-4000:]}")
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


def measure(run: subprocess.Popen, run_dir: Path, args: argparse.Namespace) -> Iterator[float]:
    """Seconds of each restart. Raises TimeoutError for one that takes too long, ChildProcessError where the launcher ended."""
    first = await_change(run, run_dir, "start.json", 0, args.seconds)
    for number in range(args.kills):
        await_change(run, run_dir, "checkpoints/step-*[0-9]/manifest.json", first, args.seconds)
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        began = time.monotonic()
        os.kill(int(ranks[number % args.nproc]), signal.SIGKILL)
        first = await_change(run, run_dir, "start.json", first, args.seconds)
        seconds = time.monotonic() - began
        print(f"kill {number + 1}, of rank {number % args.nproc}: {seconds:.1f} s", flush=True)
        yield seconds


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
