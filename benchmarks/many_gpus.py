"""The table that a host of several GPUs is needed for, part by part; what has been measured is kept.

    python -m benchmarks.many_gpus OUT --gpus 8 [--only mpt-1b …] [--seconds 540] [--try] [--torchtitan PYTHON] [--set a.b=c …]

Each part runs one model's programs one after the other: `llmtrain bench train`, `benchmarks.parallel`,
`scripts/gpu/moving_checkpoint.py`, and torchtitan (peers/llama3_torchtitan.py) where a Python that has it is named. A program that
has not ended after what is left of `--seconds` is killed, and the next call with the same OUT goes on with it. After each program
OUT/table.md and OUT/table.png are written anew, from OUT alone: figures, bars, and beside each figure what `llmtrain describe
--nodes 1` predicts from the speed on the fewest GPUs. try: models of two layers and few steps, by the same programs, for a try on
fewer GPUs; `--set a.b=c …` makes our models smaller still.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.many_gpus_table import write
from llmtrain.errors import exit_with

ROOT = Path(__file__).parents[1]
GRACE = 10
"""Seconds for a program to end after SIGTERM."""
TERMINATED = threading.Event()
"""SIGTERM has come: programs are sessions of their own, which it does not reach."""
LEAST = 20
"""Seconds without which no program is begun."""
TRIED = {"mpt-1b": "attn*2", "mpt-7b": "attn*2", "llama3-8b": "attn*2", "zamba2-2.7b": "m s+m s+m"}


@dataclass(frozen=True)
class Program:
    """A command whose status is 0 once its whole result is there; run again, it goes on or begins anew. last: it needs results of
    the others of its part."""

    name: str
    command: list[str]
    last: bool = False


@dataclass(frozen=True)
class Host:
    """The place and the scale of the programs of a part."""

    out: Path
    gpus: int
    small: bool
    torchtitan: str | None
    settings: tuple[str, ...] = ()
    steps: tuple[int, int] = (3, 8)
    """Steps before those that are timed, and those."""
    microbatch_7b: int = 4

    def trained(self, model: str, gpus: int, batch: int, *settings: str, precision: str = "bf16") -> Program:
        """`llmtrain bench train` of one case, with so many sequences a step."""
        gpus = min(gpus, self.gpus)
        warmup, steps = (2, 2) if self.small else self.steps
        name = f"{Path(model).name}-{gpus}gpu-{precision}"
        found = {
            "models": [f"yamls/{model}.yaml"],
            "gpus": [gpus],
            "precisions": [precision],
            "steps": steps,
            "warmup": warmup,
            "settings": [f"train.global_batch_size={batch}", *settings, *self.reduced(model)],
        }
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "data"  # one for all models
        (self.out / "data").mkdir(exist_ok=True)
        if not data.is_symlink():
            data.symlink_to(self.out / "data")
        (folder / "sweep.yaml").write_text(json.dumps(found, indent=1), encoding="utf-8")
        command = [sys.executable, "-m", "llmtrain", "bench", "train", str(folder / "sweep.yaml"), "--out", str(folder)]
        return Program(name, command)

    def parallel(self, name: str, model: str, *settings: str) -> Program:
        file = self.out / f"{name}.json"
        steps = ["--steps", "1" if self.small else "3", "--warmup", "1"]
        common = ["train.sharding.strategy=full", "train.microbatch_size=1", *self.reduced(model)]
        command = [sys.executable, "-m", "benchmarks.parallel", f"yamls/{model}.yaml", *settings, *common]
        return Program(name, [*command, "--nproc", str(self.gpus), *steps, "--out", str(file)])

    def reduced(self, model: str) -> list[str]:
        """Settings that make a model smaller, for a try."""
        return [*([f"model.layers={TRIED[Path(model).name]}"] if self.small else []), *self.settings]


def mpt_1b(host: Host) -> list[Program]:
    return [host.trained("bench/mpt-1b", gpus, 128 * gpus) for gpus in (host.gpus, 1)]


def mpt_7b(host: Host) -> list[Program]:
    """All GPUs, and the same global batch on two of them."""
    model, batch = "pretrain/mpt-7b", 32 * host.gpus
    settings = (f"train.microbatch_size={host.microbatch_7b}", "train.activation_checkpointing={type: none}")
    return [
        host.trained(model, host.gpus, batch, *settings),
        host.trained(model, host.gpus, batch, *settings, precision="tensorwise"),
        host.trained(model, 2, batch, *settings),
    ]


def llama(host: Host) -> list[Program]:
    settings = ("train.microbatch_size=1", "train.activation_checkpointing={type: none}")
    found = []
    for precision in ("bf16", "tensorwise"):
        found.append(host.trained("pretrain/llama3-8b", host.gpus, host.gpus, *settings, precision=precision))
        if host.torchtitan:
            file = host.out / f"torchtitan-{precision}.json"
            options = [f"--nproc={host.gpus}", "--seq-len=8192", "--batch=1", *(["--float8"] * (precision != "bf16"))]
            few = ["--layers=2", "--steps=2", "--warmup=2"] if host.small else []
            peer = str(ROOT / "benchmarks" / "peers" / "llama3_torchtitan.py")
            found.append(Program(file.stem, [host.torchtitan, peer, str(file), *options, *few]))
    return found


def zamba2(host: Host) -> list[Program]:
    """As many sequences for each GPU, on all and on one."""
    model = "pretrain/zamba2-2.7b"
    return [host.trained(model, gpus, 16 * gpus, "train.microbatch_size=2") for gpus in (host.gpus, 1)]


def context(host: Host) -> list[Program]:
    shared = (f"train.parallel.context={host.gpus}", "train.global_batch_size=16")
    tokens = 32_768 // (8 if host.small else 1)
    return [
        host.parallel(
            "context-zamba2",
            "pretrain/zamba2-2.7b",
            *shared,
            "train.activation_checkpointing.type=kernels",
            f"data.seq_len={tokens * host.gpus}",
        ),
        host.parallel(
            "context-llama",
            "pretrain/llama3-8b",
            *shared,
            "train.activation_checkpointing.type=selective",
            f"data.seq_len={tokens // 2 * host.gpus}",
        ),
    ]


def moving(host: Host) -> list[Program]:
    """A checkpoint of all GPUs, resumed on half, on a quarter and on one, by other kernels each time."""
    counts = list(dict.fromkeys(max(host.gpus // n, 1) for n in (1, 2, 4, host.gpus)))
    legs = ",".join(f"{count}{'ab'[number % 2]}" for number, count in enumerate(counts))
    every = 10 if host.small else 100
    folder = host.out / "moving"
    sizes = [
        f"train.duration={every * len(counts)} steps",
        f"checkpoint.interval={every} steps",
        f"schedule.warmup={every // 2} steps",
        *host.settings,
    ]
    script = str(ROOT / "scripts" / "gpu" / "moving_checkpoint.py")
    moves = ["--whole", f"{host.gpus}a", "--legs", legs, "--every", str(every)]
    command = [sys.executable, script, str(folder), *sizes, *moves, "--part"]
    return [
        Program("moving-whole", [*command, "prepare,whole"]),
        Program("moving-legs", [*command, "prepare,moving"]),
        Program("moving", [*command, "report"], last=True),
    ]


PARTS: dict[str, Callable[[Host], list[Program]]] = {
    "mpt-1b": mpt_1b,
    "mpt-7b": mpt_7b,
    "llama": llama,
    "zamba2": zamba2,
    "context": context,
    "moving": moving,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--beside", action="store_true", help="all programs at once, for a try: no figure of it counts")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(3, 8), metavar=("WARMUP", "TIMED"), help="of bench train"
    )
    parser.add_argument("--try", action="store_true", dest="small")
    parser.add_argument("--torchtitan", metavar="PYTHON")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: TERMINATED.set())
    host = Host(args.out.absolute(), args.gpus, args.small, args.torchtitan, tuple(args.settings), tuple(args.steps))
    host.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    named = {program.name: program for part in args.only for program in PARTS[part](host)}
    programs = list(named.values())
    failed, table = [], ""
    turns = [[program] for program in programs]
    if args.beside:
        turns = [[one for one in programs if not one.last], [one for one in programs if one.last]]
    for beside in turns:
        found = all_ended(beside, host.out, deadline)
        failed += [program.name for program, has in zip(beside, found, strict=True) if not has]
        table = write(host.out, host.gpus)
    print(table)
    if failed:
        print(
            f"without a result: {', '.join(failed)}; their output is in {host.out}, the same command goes on",
            file=sys.stderr,
        )
    return int(bool(failed))


def ended(program: Program, out: Path, deadline: float) -> bool:
    """Run a program that lacks its result, if time is left. Returns whether it has one."""
    return all_ended([program], out, deadline) == [True]


def all_ended(programs: Sequence[Program], out: Path, deadline: float) -> list[bool]:
    """Run those programs that lack their results beside each other, if time is left. Returns whether each has one."""
    running: list[tuple[Program, subprocess.Popen]] = []
    began = time.monotonic()
    for program in programs:
        if not (out / f"{program.name}.ended").exists() and deadline - began >= LEAST and not TERMINATED.is_set():
            print(f"{program.name} …", flush=True)
            with (out / f"{program.name}.txt").open("wb") as log:
                process = subprocess.Popen(
                    program.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
            running.append((program, process))
    waited = list(running)
    while waited:
        if late := time.monotonic() > deadline or TERMINATED.is_set():
            end([process for _, process in waited if process.poll() is None])
        for one in list(waited):
            program, process = one
            status = process.poll()
            if status is None and not late:
                continue
            waited.remove(one)
            how = "cut off" if late and status else f"status {status}"
            print(f"{program.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
            if status == 0:
                (out / f"{program.name}.ended").touch()
        time.sleep(0.2)
    return [(out / f"{program.name}.ended").exists() for program in programs]


def end(processes: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they have started, which may have to end runs of their own first."""
    for process in processes:
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    exit_with(main)
