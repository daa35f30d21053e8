"""The table that a host of several GPUs is needed for, program by program; what has been measured is kept.

    python -m benchmarks many_gpus OUT --gpus 8 [--only mpt-7b …] [--seconds 540] [--try] [--torchtitan PYTHON] [--set a.b=c …]

Programs are `llmtrain bench train` of one case each, `benchmarks parallel`, `scripts/gpu/moving_checkpoint.py`, and torchtitan
(peers/llama3_torchtitan.py) where a Python that has it is named. First all shapes are compiled beside each other, by models of
two layers and one step, whose graphs are those of the whole (not with --cold); then each program has its turn on the GPUs, while
the next one's ranks import what they need. Those of fewer GPUs run beside each other. A program that has not ended after its time
or what is left of `--seconds` is killed, and the next call with the same OUT goes on with it. After each turn OUT/table.md and
OUT/table.png are written anew, from OUT alone: figures, the bars of eight GPUs, and what `llmtrain describe --nodes 1` predicts.
try: only the models of two layers, all at once; `--set a.b=c …` makes our models smaller still.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.arguments import Parser, natural, number, positive
from benchmarks.harness.turns import ROOT, TERMINATED, Program, groups, run
from benchmarks.programs.training.many_gpus_table import write

TRIED = {"mpt-1b": "attn*2", "mpt-7b": "attn*2", "llama3-8b": "attn*2", "zamba2-2.7b": "m s+m s+m"}
TRAINER = "torch,torchao.float8,composer,streaming,llmtrain.train.run,llmtrain.train.report.summary"
"""Modules of a rank of `llmtrain train`."""
COMPILING = 100
"""Seconds for compiling all shapes beside each other (86 on four H200s with 64 cores)."""
STEPS = "torch,llmtrain.models.causal_lm,llmtrain.train.parallel,llmtrain.train.optim,llmtrain.train.batches"


@dataclass(frozen=True)
class Host:
    """The place and the scale of the programs of a part."""

    out: Path
    gpus: int
    small: bool
    torchtitan: str | None
    settings: tuple[str, ...] = ()
    steps: tuple[int, int] = (1, 3)
    """Steps of `bench train` before those that are timed, without the first, and those."""
    tokens: int = 32_768
    """Tokens for each of eight GPUs of a sequence that they share; Llama has half of that."""
    microbatch_7b: int = 4
    timed: int | None = None
    """Steps that are timed of every program of `bench train` and of torchtitan, if not each part's own number."""
    llama_microbatches: int = 1
    """Microbatches a step of Llama-3-8B beside torchtitan."""

    def trained(
        self,
        model: str,
        gpus: int,
        microbatch: int,
        microbatches: int,
        *settings: str,
        precision: str = "bf16",
        steps: tuple[int, int] | None = None,
    ) -> Program:
        """`llmtrain bench train` of one case, with so many microbatches a step on each GPU."""
        gpus = min(gpus, self.gpus)
        batch = gpus * microbatch * (2 if self.small else microbatches)
        warmup, timed = (1, 1) if self.small else steps or self.steps
        timed = timed if self.small else self.timed or timed
        name = f"{Path(model).name}-{gpus}gpu-{precision}"
        found = {
            "models": [f"yamls/{model}.yaml"],
            "gpus": [gpus],
            "precisions": [precision],
            "steps": timed,
            "warmup": warmup,
            "settings": [
                f"train.global_batch_size={batch}",
                f"train.microbatch_size={microbatch}",
                *settings,
                *self.reduced(model),
            ],
        }
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "data"  # one for all models
        (self.out / "data").mkdir(exist_ok=True)
        if not data.is_symlink():
            data.symlink_to(self.out / "data")
        (folder / "sweep.yaml").write_text(json.dumps(found, indent=1), encoding="utf-8")
        command = [sys.executable, "-m", "llmtrain", "bench", "train", str(folder / "sweep.yaml"), "--out", str(folder)]
        return Program(name, command, gpus, 150, TRAINER)

    def parallel(self, model: str, seq_len: int, timed: int, checkpointing: str) -> Program:
        """`benchmarks parallel` over sequences that all GPUs share."""
        name = f"context-{Path(model).name}-{seq_len}"
        file = self.out / f"{name}.json"
        settings = [
            f"train.parallel.context={self.gpus}",
            f"train.activation_checkpointing.type={checkpointing}",
            "train.global_batch_size=16",
            "train.sharding.strategy=full",
            "train.microbatch_size=1",
            *self.reduced(model),
        ]
        steps = ["--steps", "0" if self.small else str(timed), "--warmup", "1", "--lengths", str(seq_len)]
        files = ["--out", str(file), "--rows", str(file.with_suffix(".jsonl"))]
        command = [sys.executable, "-m", "benchmarks", "parallel", f"yamls/{model}.yaml", *settings]
        return Program(name, [*command, "--nproc", str(self.gpus), *steps, *files], self.gpus, 150, STEPS)

    def reduced(self, model: str) -> list[str]:
        """Settings that make a model smaller, for a try."""
        return [*([f"model.layers={TRIED[Path(model).name]}"] if self.small else []), *self.settings]


def mpt_7b(host: Host) -> list[Program]:
    return [mpt_7b_on(host, host.gpus), mpt_7b_on(host, host.gpus, "tensorwise")]


def mpt_7b_on(host: Host, gpus: int, precision: str = "bf16") -> Program:
    """The same global batch on any number of GPUs: 32 sequences for each of all."""
    microbatches = 32 * host.gpus // gpus // host.microbatch_7b
    plain = "train.activation_checkpointing={type: none}"
    steps = (1, 2) if gpus < host.gpus else None  # long ones
    return host.trained(
        "pretrain/mpt-7b", gpus, host.microbatch_7b, microbatches, plain, precision=precision, steps=steps
    )


def mpt_1b(host: Host) -> list[Program]:
    return [mpt_1b_on(host, host.gpus)]


def mpt_1b_on(host: Host, gpus: int) -> Program:
    return host.trained("bench/mpt-1b", gpus, 16, 8, steps=(2, 3))


def zamba2(host: Host) -> list[Program]:
    return [zamba2_on(host, host.gpus)]


def zamba2_on(host: Host, gpus: int) -> Program:
    return host.trained("pretrain/zamba2-2.7b", gpus, 2, 8, steps=(2, 3))


def fewer(host: Host) -> list[Program]:
    """Speeds on fewer GPUs, which predictions start from."""
    return [mpt_7b_on(host, 2), zamba2_on(host, 1), mpt_1b_on(host, 1)]


def llama(host: Host) -> list[Program]:
    return [program for precision in ("bf16", "tensorwise") for program in llama_in(host, precision)]


def llama_float8(host: Host) -> list[Program]:
    return llama_in(host, "tensorwise")


def llama_in(host: Host, precision: str) -> list[Program]:
    """Ours, and torchtitan's where there is one."""
    plain = "train.activation_checkpointing={type: none}"
    microbatches = host.llama_microbatches
    found = [host.trained("pretrain/llama3-8b", host.gpus, 1, microbatches, plain, precision=precision, steps=(3, 8))]
    if host.torchtitan:
        file = host.out / f"torchtitan-{precision}.json"
        batch = ["--batch=1", f"--global-batch={host.gpus * microbatches}"]
        options = [f"--nproc={host.gpus}", "--seq-len=8192", *batch, *(["--float8"] * (precision != "bf16"))]
        few = ["--layers=2", "--steps=1", "--warmup=1"] if host.small else [f"--steps={host.timed or 8}", "--warmup=4"]
        peer = str(ROOT / "benchmarks" / "peers" / "llama3_torchtitan.py")
        command = [host.torchtitan, peer, str(file), *options, *few]
        found.append(Program(file.stem, command, host.gpus, 200, "torch"))
    return found


def context(host: Host) -> list[Program]:
    """Sequences that all GPUs share: of the bar's length, and of as many tokens for each GPU as the bar has on eight."""
    zamba2, llama = host.tokens, host.tokens // 2
    return [
        host.parallel(
            "pretrain/llama3-8b", llama * 8, 2, "selective" if host.gpus >= 8 else "kernels"
        ),  # 131 GiB on four
        host.parallel("pretrain/zamba2-2.7b", zamba2 * host.gpus, 2, "kernels"),
        host.parallel("pretrain/zamba2-2.7b", zamba2 * 8, 1, "kernels"),
        host.parallel("pretrain/llama3-8b", llama * host.gpus, 2, "selective"),
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
        Program("moving-legs", [*command, "prepare,moving"], host.gpus, 300),
        Program("moving-whole", [*command, "prepare,whole"], 0, 300),
        Program("moving", [*command, "report"], last=True),
    ]


PARTS: dict[str, Callable[[Host], list[Program]]] = {
    "mpt-7b": mpt_7b,
    "mpt-1b": mpt_1b,
    "zamba2": zamba2,
    "fewer": fewer,
    "llama-float8": llama_float8,
    "llama": llama,
    "context": context,
    "moving": moving,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=positive, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=number, default=540)
    parser.add_argument(
        "--steps", type=natural, nargs=2, default=(1, 3), metavar=("WARMUP", "TIMED"), help="of bench train"
    )
    parser.add_argument(
        "--timed", type=positive, help="timed steps of bench train and torchtitan, if not each part's own"
    )
    parser.add_argument("--llama-microbatches", type=positive, default=1, help="a step, beside torchtitan")
    parser.add_argument("--tokens", type=positive, default=32_768, help="of a shared sequence, for each GPU")
    parser.add_argument("--microbatch-7b", type=positive, default=4, help="of MPT-7B; 4 for 141 GB")
    parser.add_argument("--cold", action="store_true", help="compile in each program's own turn")
    parser.add_argument("--try", action="store_true", dest="small")
    parser.add_argument("--torchtitan", metavar="PYTHON")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings")
    args = parser.parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: TERMINATED.set())
    out, settings = args.out.absolute(), tuple(args.settings)
    steps = tuple(args.steps)
    host = Host(
        out,
        args.gpus,
        args.small,
        args.torchtitan,
        settings,
        steps,
        args.tokens,
        args.microbatch_7b,
        args.timed,
        args.llama_microbatches,
    )
    deadline = time.monotonic() + args.seconds
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # the cores are shared by many ranks
    programs = programs_of(host, args.only)
    turns = groups(programs, args.gpus)
    if args.small:
        turns = [[one for one in programs if not one.last], [one for one in programs if one.last]]
    elif not args.cold:
        turns = [compiling(host, args.only), *turns]
    failed = run(turns, out, args.gpus, deadline, lambda: write(out, args.gpus))
    print(write(out, args.gpus))
    if failed:
        print(
            f"without a result: {', '.join(failed)}; their output is in {out}, the same command goes on",
            file=sys.stderr,
        )
    return int(bool(failed))


def programs_of(host: Host, parts: list[str]) -> list[Program]:
    """Programs of parts, each once: on two GPUs, all of them are two of them."""
    return list({program.name: program for part in parts for program in PARTS[part](host)}.values())


def compiling(host: Host, parts: list[str]) -> list[Program]:
    """Programs that fill this machine's caches of compiled code: all, but those that compile nothing."""
    folder = Path(tempfile.gettempdir()) / f"many-gpus-compiled-{host.gpus}"
    folder.mkdir(exist_ok=True)
    same = {"mpt-7b-2gpu-bf16"} - {f"mpt-7b-{host.gpus}gpu-bf16"}  # as two of the ranks of all GPUs
    programs = programs_of(replace(host, out=folder, small=True), [part for part in parts if part != "moving"])
    return [
        replace(program, name=f"compiling {program.name}", seconds=COMPILING, out=folder)
        for program in programs
        if program.name not in same
    ]
