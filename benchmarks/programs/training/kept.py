"""Speed of several GPUs together beside that of each alone, these at the same time: tokens/s per GPU, and the share that is kept.

    python -m benchmarks kept OUT --gpus 2 --case FILE SEQ_LEN MICROBATCH GLOBAL_BATCH [--case …] [--steps 20] [--seconds 540]

Each case is trained by `llmtrain bench train` with the same batch on all GPUs and on one; the ranks of the next program import what
they need meanwhile. What is measured is kept in OUT: the same command goes on. Prints, and writes to OUT/kept.json, each case's
speed and what is kept of every single GPU's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, natural, number, positive
from benchmarks.harness.turns import TERMINATED, Program, groups, run
from benchmarks.programs.training.many_gpus import TRAINER
from llmtrain.bench.train.command import RESULTS, read_results


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=positive, default=2)
    parser.add_argument("--case", nargs=4, action="append", required=True, dest="cases")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--warmup", type=natural, default=2, help="steps before, without the first one")
    parser.add_argument("--seconds", type=number, default=540)
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings")
    args = parser.parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: TERMINATED.set())
    deadline = time.monotonic() + args.seconds
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
    args.out = args.out.absolute()
    (args.out / "data").mkdir(parents=True, exist_ok=True)
    cases = [Case(args.out, args.gpus, *case) for case in args.cases]
    common = {"steps": args.steps, "warmup": args.warmup}
    programs = [program for case in cases for program in case.programs(common, args.settings)]

    def write() -> None:
        found = {case.name: result for case in cases if (result := case.result())}
        (args.out / "kept.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    failed = run(groups(programs, args.gpus), args.out, args.gpus, deadline, write)
    write()
    print((args.out / "kept.json").read_text(encoding="utf-8"))
    return int(bool(failed))


class Case:
    """A model with its batch, on all GPUs and on each."""

    def __init__(self, out: Path, gpus: int, file: str, seq_len: str, microbatch: str, global_batch: str) -> None:
        self.out, self.gpus, self.file = out, gpus, file
        self.seq_len = int(seq_len)
        self.batch = [f"train.microbatch_size={microbatch}", f"train.global_batch_size={global_batch}"]
        self.name = f"{Path(file).stem}-{seq_len}-{microbatch}-{global_batch}"
        self.folders = {f"{self.name}-together": gpus} | {f"{self.name}-alone{number}": 1 for number in range(gpus)}

    def programs(self, common: dict[str, int], settings: list[str]) -> list[Program]:
        found = []
        for name, gpus in self.folders.items():
            folder = self.out / name
            folder.mkdir(exist_ok=True)
            if not (folder / "data").is_symlink():
                (folder / "data").symlink_to(self.out / "data")  # one for all
            sweep = {"models": [self.file], "seq_lens": [self.seq_len], "gpus": [gpus], **common}
            (folder / "sweep.yaml").write_text(json.dumps(sweep | {"settings": [*self.batch, *settings]}, indent=1))
            command = [sys.executable, "-m", "llmtrain", "bench", "train", str(folder / "sweep.yaml")]
            found.append(Program(name, [*command, "--out", str(folder)], gpus, 300, TRAINER))
        return found

    def result(self) -> dict[str, Any]:
        """Tokens/s per GPU of all together and of each alone, and the shares kept; empty until there is one."""
        speeds = {}
        for name in self.folders:
            runs = [run for run in read_results(self.out / name / RESULTS).values() if "error" not in run]
            if runs:
                speeds[name] = runs[-1]["tokens_per_second_per_gpu"]
        if not speeds:
            return {}
        together = speeds.get(f"{self.name}-together")
        alone = [speed for name, speed in speeds.items() if "-alone" in name]
        kept = [together / speed for speed in alone] if together else []
        return {"together": together, "alone": alone, "kept": kept}
