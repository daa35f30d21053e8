"""A soak test: a tiny run on the CPU is killed again and again, and must end as the one that nobody disturbed.

    python scripts/soak.py [--kills 200] [--ranks 1,2] [--seed 0] [--folder DIR]

For each number of ranks one run is left alone. Then the same run is started, killed by SIGKILL, started again at once, and so on
until it is complete; and again from the beginning, until there were enough kills. A third of them hit the launcher or one
rank alone, the others every process; they come during the start or after some steps. At every tenth start a second process
starts the same run, at the same time: one of the two must be refused, with status 2.

Each complete run is compared with the undisturbed one: parameters, optimizer state, data position and every line of its metrics,
bit for bit. Afterwards nothing may be left: no process, lock, half-written folder or shared memory. Exit status 0 if all
held. A kill costs about 8 CPU-seconds on one rank and 16 on two.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.data.prepare import prepare
from llmtrain.distributed.processes import LAUNCHER, exit_on_sigterm
from llmtrain.errors import RunError, exit_with
from llmtrain.schema.data import PrepareConfig

ROOT = Path(__file__).parents[1]
STEPS = 40
MARK = "LLMTRAIN_SOAK"
CLOCKS = ("throughput/", "checkpoint/", "start/")
"""Beginnings of the names of metrics that measure this machine."""
SECONDS_TO_END = 60.0
"""For what a kill must take with it."""
SECONDS_TO_WAIT = 900.0


class SoakError(RunError):
    """Something that must hold did not."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a tiny run again and again; it must end as an undisturbed one.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, taken in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept afterwards; default: a temporary one")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="llmtrain-soak-"))
    exit_on_sigterm()  # what was started is to end as well
    soak = Soak(folder.absolute(), random.Random(args.seed))
    try:
        soak.run(args.kills, [int(size) for size in args.ranks.split(",")])
    finally:
        soak.kill(soak.living())
        print(soak.summary(), flush=True)
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


class Soak:
    """The runs of one soak test, in a folder."""

    def __init__(self, folder: Path, rng: random.Random):
        self.folder, self.rng, self.mark = folder, rng, uuid.uuid4().hex
        self.kills: dict[str, int] = {"all": 0, "launcher": 0, "one rank": 0}
        self.starts = self.refused = self.complete = self.at_start = 0
        self.shared_memory = _shared_memory()
        self.began = time.monotonic()

    def run(self, kills: int, sizes: list[int]) -> None:
        """Kill so many times. Raises SoakError as soon as something does not hold."""
        self.folder.mkdir(parents=True, exist_ok=True)
        prepare(
            PrepareConfig(
                sources=[str(ROOT / "llmtrain" / "config")],
                out=str(self.folder / "data"),
                vocab_size=300,
                seq_len=32,
                validation_fraction=0.2,
                workers=1,
            ),
            progress=False,
        )
        whole, seconds = {}, {}
        for size in dict.fromkeys(sizes):
            began = time.monotonic()
            process = self.start(f"whole-{size}", size)
            self.wait_for(lambda name=f"whole-{size}": self.steps(name), process)
            seconds[size] = time.monotonic() - began
            self.expect_success(process)
            whole[size] = self.state(f"whole-{size}")
        number = 0
        while sum(self.kills.values()) < kills:
            size, name = sizes[number % len(sizes)], f"disturbed-{number}"
            while not self.attempt(name, size, seconds[size], may_kill=sum(self.kills.values()) < kills):
                pass
            self.require_equal(name, whole[size])
            self.require_clean(name, f"whole-{size}")
            self.complete += 1
            shutil.rmtree(self.folder / name)
            number += 1
            print(self.summary(), flush=True)
        self.wait(lambda: _shared_memory() <= self.shared_memory, "shared memory was left behind")

    def attempt(self, name: str, size: int, start_seconds: float, may_kill: bool) -> bool:
        """Start the run, with another start beside it now and then, and kill it. Returns True if it was complete before that."""
        self.starts += 1
        process = self.start(name, size)
        if self.starts % 10 == 0:
            process = self.only_one_of(process, self.start(name, size))
        if not may_kill:
            self.expect_success(process)
            return True
        if self.rng.random() < 0.3:
            self.at_start += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.rng.uniform(0.0, start_seconds))
        else:
            before, more = self.steps(name), self.rng.randrange(1, 16)
            self.wait_for(lambda: self.steps(name) >= before + more, process)
            time.sleep(self.rng.uniform(0.0, 0.05))
        if process.poll() is not None:
            self.expect_success(process)
            return True
        self.kill_some(process)
        return False

    def kill_some(self, process: subprocess.Popen) -> None:
        living = self.living()
        launched = f"{LAUNCHER}={process.pid}".encode()
        ranks = [pid for pid in living if _parent(pid) == process.pid and launched in _environment(pid)]
        kind = self.rng.choice(["launcher", "one rank", "all"]) if ranks else "all"
        self.kill({"launcher": [process.pid], "one rank": [self.rng.choice(ranks or [0])]}.get(kind, living))
        self.kills[kind] += 1
        print(f"kill {sum(self.kills.values())}: {kind}", flush=True)
        self.wait(lambda: process.poll() is not None, f"after {kind} was killed, the launcher still runs")
        # Half of the starts that follow find the processes of the one before still ending.
        if self.rng.random() < 0.5:
            self.wait(lambda: not self.living(), f"after {kind} was killed, processes still run")

    def only_one_of(self, *processes: subprocess.Popen) -> subprocess.Popen:
        """The process that goes on, of two that started the same run."""
        self.wait(
            lambda: any(process.poll() is not None for process in processes), "two starts go on beside each other"
        )
        refused, other = sorted(processes, key=lambda process: process.poll() is None)
        text = self.output(refused)
        if refused.returncode != 2 or "is held by process" not in text:
            raise SoakError(f"of two starts one ended with status {refused.returncode}, not 2:\n{text}")
        self.refused += 1
        return other

    def start(self, name: str, size: int) -> subprocess.Popen:
        file = self.folder / f"{name}.yaml"
        if not file.exists():  # another start may be reading it
            file.write_text(json.dumps(_settings(name, self.folder)))
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        environment |= {"OMP_NUM_THREADS": "1", MARK: self.mark, "PYTHONPATH": str(ROOT)}
        log = self.folder / f"{uuid.uuid4().hex}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "llmtrain", "train", str(file), "--nproc", str(size)],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        log.rename(self.folder / f"{process.pid}.log")
        return process

    def output(self, process: subprocess.Popen) -> str:
        return (self.folder / f"{process.pid}.log").read_text(errors="replace")

    def expect_success(self, process: subprocess.Popen) -> None:
        if process.wait(SECONDS_TO_WAIT) != 0:
            raise SoakError(f"a run ended with status {process.returncode}:\n{self.output(process)}")

    def steps(self, name: str) -> int:
        file = self.folder / name / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def state(self, name: str) -> dict[str, Any]:
        """Everything of a complete run that must not depend on what happened to it."""
        [last] = (self.folder / name / "checkpoints").glob(f"step-{STEPS:08d}")
        manifest = LocalCheckpoint(last).require()
        tensors = CheckpointTensors(last, manifest)
        state: dict[str, Any] = {"values": tensors.values, "clock": manifest.clock, "data": manifest.data}
        for key in tensors.names(""):
            count = int(torch.Size(tensors.shape(key) or ()).numel())
            state[key] = torch.cat(list(tensors.elements(key, [count]))).view(torch.uint8).numpy().tobytes()
        for line in (self.folder / name / "metrics.jsonl").read_text().split("\n")[:-1]:
            values = {key: value for key, value in json.loads(line).items() if not key.startswith(CLOCKS)}
            key = (
                f"metrics of step {values['step']}, {'validation' if 'loss/train/total' not in values else 'training'}"
            )
            if state.setdefault(key, values) != values:  # a step that was run again
                raise SoakError(f"{name}: {key} differ: {state[key]} and {values}")
        return state

    def require_equal(self, name: str, whole: dict[str, Any]) -> None:
        state = self.state(name)
        if different := [key for key in whole.keys() | state.keys() if whole.get(key) != state.get(key)]:
            raise SoakError(f"{name} is not the undisturbed run: {', '.join(sorted(different))} differ")

    def require_clean(self, name: str, whole: str) -> None:
        """Check that a complete run has left nothing that the undisturbed run `whole` has not."""
        self.wait(lambda: not self.living(), f"{name} is complete, but processes still run")
        found, expected = ({path.name for path in (self.folder / run).iterdir()} for run in (name, whole))
        checkpoints = [path.name for path in (self.folder / name / "checkpoints").iterdir()]
        strange = sorted((found - expected) | {entry for entry in checkpoints if not entry[5:].isdigit()})
        if strange or list(self.folder.glob(f"{name}.before-*")):
            raise SoakError(f"{name} left behind: {', '.join(strange)}")

    def living(self) -> list[int]:
        mark = f"{MARK}={self.mark}".encode()
        numbers = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
        return [pid for pid in numbers if pid != os.getpid() and mark in _environment(pid)]

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, condition: Callable[[], Any], process: subprocess.Popen) -> None:
        """Wait until the condition holds or the process ends."""
        deadline = time.monotonic() + SECONDS_TO_WAIT
        while not condition() and process.poll() is None:
            if time.monotonic() > deadline:
                raise SoakError(f"a run hangs:\n{self.output(process)}")
            time.sleep(0.02)

    def wait(self, condition: Callable[[], Any], failure: str) -> None:
        deadline = time.monotonic() + SECONDS_TO_END
        while not condition():
            if time.monotonic() > deadline:
                raise SoakError(f"{failure}: {self.living()}")
            time.sleep(0.05)

    def summary(self) -> str:
        kills = ", ".join(f"{count} of {kind}" for kind, count in self.kills.items())
        return (
            f"{sum(self.kills.values())} kills ({kills}; {self.at_start} during the start), {self.starts} starts, "
            f"{self.refused} refused beside another, {self.complete} complete runs equal the undisturbed one; "
            f"{time.monotonic() - self.began:.0f} s"
        )


def _settings(name: str, folder: Path) -> dict[str, Any]:
    rotary = {"type": "rotary"}
    streams = {split: {"streams": {"text": {"local": str(folder / "data"), "split": split}}} for split in _SPLITS}
    return {
        "name": name,
        "run_dir": str(folder / name),
        "seed": 7,
        "model": {
            "vocab_size": 300,
            "d_model": 32,
            "max_seq_len": 32,
            "blocks": {
                "m": {"type": "mamba2", "d_state": 8, "head_dim": 16, "chunk_size": 16},
                "a": {"type": "attention", "n_heads": 2, "position": rotary, "mlp": {"d_ff": 64}},
            },
            "layers": "m a",
        },
        "data": {"seq_len": 32, "num_workers": 1, **streams},
        "train": {"duration": f"{STEPS} steps", "global_batch_size": 4, "microbatch_size": 2, "compile": "off"},
        "optimizer": {"lr": 3e-3},
        "eval": {"interval": "20 steps", "max_samples": 4},
        "checkpoint": {"interval": "3 steps", "keep_last": 3},
        "logging": {"tensorboard": False, "progress_bar": False},
    }


_SPLITS = ("train", "validation")


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _environment(pid: int) -> bytes:
    """The environment that a process was started with; of one that has ended, nothing."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    exit_with(main)
