"""Training speed of one model by two versions of the package, in turn on the same machine: BASE, NEW, BASE, NEW.

    python scripts/gpu/compare_commits.py BASE NEW FILE [a.b=c …] [--steps 12] [--rounds 2] [--nproc 1] --out FOLDER

BASE and NEW are checkouts (git worktree, or an unpacked git archive). Each run is `llmtrain train` of that checkout on FILE,
over tokens of Python's standard library, ended when step --steps is in its metrics: nothing is validated or saved. Printed are
the tokens/s of each run (from the median of the steps after the third), of each checkout over its runs, and NEW / BASE.
Exit status 0 (PASS): the ratio lies within --tolerance of 1.

FOLDER/runs.json has every run that is done. The same command again makes only the missing ones; a checkout, FILE or setting
that has changed begins anew.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llmtrain.distributed.processes import exit_on_sigterm
from llmtrain.schema.load import load_config

SKIPPED_STEPS = 3
SETTINGS = (
    "train.duration=100000 steps",
    "schedule.warmup=2 steps",
    "eval.interval=100000 steps",
    "checkpoint.interval=100000 steps",
    "checkpoint.background=false",
    "logging.interval=1",
    "logging.tensorboard=false",
    "logging.progress_bar=false",
    "data.train=null",
    "data.validation=null",
)
METRIC = "throughput/step_seconds"


def main() -> int:
    args = _arguments()
    args.out = args.out.absolute()
    overrides = [*SETTINGS, f"data.prepare={_shards(args.out)}", *args.overrides]
    tokens_per_step = load_config(args.file, overrides).tokens_per_step
    checkouts = {"BASE": args.base.resolve(), "NEW": args.new.resolve()}
    identity = {name: package_digest(folder) for name, folder in checkouts.items()}
    identity |= {"file": Path(args.file).read_text(), "overrides": overrides, "steps": args.steps, "nproc": args.nproc}
    args.out.mkdir(parents=True, exist_ok=True)
    runs = load_runs(args.out / "runs.json", identity)
    exit_on_sigterm()  # so that the run below ends too
    for number in range(1, args.rounds + 1):
        for name, folder in checkouts.items():
            if len(runs[name]) < number:
                seconds = train(folder, args.file, overrides, args.steps, args.nproc, args.out / f"{name}-{number}")
                runs[name].append(seconds)
                save_runs(args.out / "runs.json", identity, runs)
                print(f"{name} {number}: {tokens_per_step / statistics.median(seconds):,.0f} tokens/s", flush=True)
    text, passed = report(runs, tokens_per_step, args.tolerance)
    print(text, flush=True)
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("file", help="the YAML, for both")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings that replace the file's, for both")
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first three do not count")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each checkout")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument("--tolerance", type=float, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_intermixed_args()
    if args.steps <= SKIPPED_STEPS:
        parser.error(f"--steps {args.steps}: must be more than {SKIPPED_STEPS}")
    for folder in (args.base, args.new):
        if not (folder / "llmtrain" / "cli.py").is_file():
            parser.error(f"{folder} is no checkout: it has no llmtrain/cli.py (git worktree add {folder} COMMIT)")
    return args


def _shards(out: Path) -> str:
    """The data.prepare section. Runs of all models with the same sequence length share one folder."""
    folder = f"'{out.parent}/data/${{data.seq_len}}'"
    sizes = "vocab_size: 4096, validation_fraction: 0, seq_len: '${data.seq_len}'"
    return f"{{sources: [stdlib], out: {folder}, {sizes}}}"


def package_digest(checkout: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted((checkout / "llmtrain").rglob("*")):
        if file.suffix in (".py", ".yaml", ".json"):
            digest.update(f"{file.relative_to(checkout)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def load_runs(file: Path, identity: dict[str, Any]) -> dict[str, list[list[float]]]:
    """Step times by checkout and run; empty when they were measured of anything else."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        content = json.loads(file.read_text())
        if content["identity"] == identity:
            return content["runs"]
    return {"BASE": [], "NEW": []}


def save_runs(file: Path, identity: dict[str, Any], runs: dict[str, list[list[float]]]) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"identity": identity, "runs": runs}, indent=1) + "\n")
    partial.replace(file)


def train(checkout: Path, file: str, overrides: list[str], steps: int, nproc: int, run_dir: Path) -> list[float]:
    """Seconds of the steps after the third. Kills the training after its last step, before it would save.

    Raises RuntimeError when the training ends by itself; its output is in run_dir.log.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "llmtrain.cli", "train", "--nproc", str(nproc)]
    command += [str(Path(file).absolute()), *overrides]
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    log = run_dir.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"run_dir={run_dir}"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while len(found := step_seconds(run_dir / "metrics.jsonl", steps)) < steps - SKIPPED_STEPS:
                if process.poll() is not None:
                    tail = "\n".join(log.read_text().splitlines()[-15:])
                    raise RuntimeError(f"{' '.join(command)}\nin {checkout} ended with {process.returncode}:\n{tail}")
                time.sleep(0.2)
            return found
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def step_seconds(metrics: Path, steps: int) -> list[float]:
    """Step times from the metrics, without the first three steps and those after `steps`."""
    if not metrics.exists():
        return []
    *lines, _ = metrics.read_text().split("\n")  # what follows the last line break is not complete
    entries = [entry for entry in map(json.loads, lines) if METRIC in entry]
    return [entry[METRIC] for entry in entries if SKIPPED_STEPS < entry["step"] <= steps]


def report(runs: dict[str, list[list[float]]], tokens_per_step: int, tolerance: float) -> tuple[str, bool]:
    """A table of tokens/s, and whether NEW is as fast as BASE."""
    speed = {}
    lines = []
    for name, times in runs.items():
        each = [tokens_per_step / statistics.median(seconds) for seconds in times]
        speed[name] = tokens_per_step / statistics.median([value for seconds in times for value in seconds])
        lines.append(f"{name:4} {speed[name]:12,.0f} tokens/s  (runs: {', '.join(f'{value:,.0f}' for value in each)})")
    ratio = speed["NEW"] / speed["BASE"]
    passed = abs(ratio - 1) <= tolerance
    verdict = "PASS" if passed else "FAIL"
    return "\n".join([*lines, f"NEW / BASE {ratio:.4f}: {verdict} (within {100 * tolerance:g} %)"]), passed


if __name__ == "__main__":
    sys.exit(main())
