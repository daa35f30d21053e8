"""The figures that a host of several GPUs is needed for, program by program; what has been measured is kept.

    python -m benchmarks many_gpus OUT --gpus 8 [--only mpt-7b …] [--seconds 540] [--torchtitan PYTHON] [--set a.b=c …]

Programs are `llmtrain bench train` of one case each, `benchmarks parallel`, `scripts/gpu/moving_checkpoint.py`, and torchtitan
(peers/llama3_torchtitan.py) where a Python that has it is named. Each has its turn on the GPUs, while the next one's ranks import
what they need; those of fewer GPUs run beside each other. A program that has not ended after its time or what is left of
`--seconds` is killed, and the next call with the same OUT goes on with it. After each turn OUT/rows.json is written anew, from OUT
alone: speeds, MFU and peaks, beside torchtitan's speed and what `llmtrain describe` estimates of the memory.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, number, positive
from benchmarks.harness.report import Report
from benchmarks.harness.turns import ROOT, Program, bench_train, take_turns

STEPS = "torch,llmtrain.models.causal_lm,llmtrain.train.parallel,llmtrain.train.optim,llmtrain.train.composer_model"
TOKENS = 32_768
"""Of a sequence that GPUs share, for each of them."""
PLAIN = "train.activation_checkpointing={type: none}"


@dataclass(frozen=True)
class Host:
    """The place and the scale of the programs: the command's arguments."""

    out: Path
    gpus: int
    torchtitan: str | None = None
    settings: Sequence[str] = ()
    timed: int | None = None
    llama_microbatches: int = 1

    def trained(
        self, model: str, gpus: int, microbatch: int, microbatches: int, *settings: str,
        precision: str = "bf16", steps: Sequence[int] = (1, 3),
    ) -> Program:  # fmt: skip
        """`llmtrain bench train` of one case, with so many microbatches a step on each GPU."""
        gpus = min(gpus, self.gpus)
        warmup, timed = steps
        batch = [f"train.global_batch_size={gpus * microbatch * microbatches}", f"train.microbatch_size={microbatch}"]
        sweep = {"models": [f"yamls/{model}.yaml"], "gpus": [gpus], "precisions": [precision], "warmup": warmup}
        sweep |= {"steps": self.timed or timed, "settings": [*batch, *settings, *self.settings]}
        return bench_train(self.out, f"{Path(model).name}-{gpus}gpu-{precision}", sweep, gpus, 150)

    def parallel(self, model: str, seq_len: int, timed: int, checkpointing: str) -> Program:
        """`benchmarks parallel` over sequences that all GPUs share."""
        name = f"context-{Path(model).name}-{seq_len}"
        settings = [f"train.parallel.context={self.gpus}", f"train.activation_checkpointing.type={checkpointing}"]
        settings += ["train.global_batch_size=16", "train.sharding.strategy=full", "train.microbatch_size=1"]
        options = ["--nproc", self.gpus, "--steps", timed, "--warmup", 1, "--lengths", seq_len]
        command = [sys.executable, "-m", "benchmarks", "parallel", f"yamls/{model}.yaml", *settings, *self.settings]
        command += [*map(str, options), "--out", str(self.out / f"{name}.json")]
        return Program(name, command, self.gpus, 150, STEPS)


def mpt_7b(host: Host, gpus: int, precision: str = "bf16") -> Program:
    """The same global batch on any number of GPUs: 32 sequences for each of all."""
    microbatches = 32 * host.gpus // gpus // 4
    steps = (1, 2) if gpus < host.gpus else (1, 3)  # long ones
    return host.trained("pretrain/mpt-7b", gpus, 4, microbatches, PLAIN, precision=precision, steps=steps)


def mpt_1b(host: Host, gpus: int) -> Program:
    return host.trained("bench/mpt-1b", gpus, 16, 8, steps=(2, 3))


def zamba2(host: Host, gpus: int) -> Program:
    return host.trained("pretrain/zamba2-2.7b", gpus, 2, 8, steps=(2, 3))


def llama(host: Host, precision: str) -> list[Program]:
    """Ours, and torchtitan's where there is one."""
    many = host.llama_microbatches
    found = [host.trained("pretrain/llama3-8b", host.gpus, 1, many, PLAIN, precision=precision, steps=(3, 8))]
    if host.torchtitan:
        file = host.out / f"torchtitan-{precision}.json"
        options = [f"--nproc={host.gpus}", "--seq-len=8192", "--batch=1", f"--global-batch={host.gpus * many}"]
        options += [*(["--float8"] * (precision != "bf16")), f"--steps={host.timed or 8}", "--warmup=4"]
        peer = str(ROOT / "benchmarks" / "peers" / "llama3_torchtitan.py")
        found.append(Program(file.stem, [host.torchtitan, peer, str(file), *options], host.gpus, 200, "torch"))
    return found


def context(host: Host) -> list[Program]:
    """Sequences that all GPUs share: as many tokens as on eight, and as many for each GPU."""
    return [
        host.parallel(
            "pretrain/llama3-8b", TOKENS * 4, 2, "selective" if host.gpus >= 8 else "kernels"
        ),  # 131 GiB on four
        host.parallel("pretrain/zamba2-2.7b", TOKENS * host.gpus, 2, "kernels"),
        host.parallel("pretrain/zamba2-2.7b", TOKENS * 8, 1, "kernels"),
        host.parallel("pretrain/llama3-8b", TOKENS // 2 * host.gpus, 2, "selective"),
    ]


def moving(host: Host) -> list[Program]:
    """A checkpoint of all GPUs, resumed on half, on a quarter and on one, by other kernels each time."""
    counts = list(dict.fromkeys(max(host.gpus // n, 1) for n in (1, 2, 4, host.gpus)))
    legs = ",".join(f"{count}{'ab'[number % 2]}" for number, count in enumerate(counts))
    sizes = [f"train.duration={100 * len(counts)} steps", "checkpoint.interval=100 steps", "schedule.warmup=50 steps"]
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "moving_checkpoint.py"), str(host.out / "moving"), *sizes]
    command += [*host.settings, "--whole", f"{host.gpus}a", "--legs", legs, "--every", "100", "--part"]
    return [
        Program("moving-legs", [*command, "prepare,moving"], host.gpus, 300),
        Program("moving-whole", [*command, "prepare,whole"], 0, 300),
        Program("moving", [*command, "report"], last=True),
    ]


PARTS: dict[str, Callable[[Host], list[Program]]] = {
    "mpt-7b": lambda host: [mpt_7b(host, host.gpus), mpt_7b(host, host.gpus, "tensorwise")],
    "mpt-1b": lambda host: [mpt_1b(host, host.gpus)],
    "zamba2": lambda host: [zamba2(host, host.gpus)],
    "fewer": lambda host: [mpt_7b(host, 2), zamba2(host, 1), mpt_1b(host, 1)],  # which predictions start from
    "llama-float8": lambda host: llama(host, "tensorwise"),
    "llama": lambda host: [*llama(host, "bf16"), *llama(host, "tensorwise")],
    "context": context,
    "moving": moving,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=positive, required=True)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=number, default=540)
    parser.add_argument("--timed", type=positive, help="timed steps, torchtitan's too, if not each part's own")
    parser.add_argument("--llama-microbatches", type=positive, default=1, help="a step, beside torchtitan")
    parser.add_argument("--torchtitan", metavar="PYTHON")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", dest="settings")
    args = parser.parse(argv)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    host = host_of(args)
    programs = programs_of(host, args.only)
    return take_turns(programs, host.out, host.gpus, args.seconds, lambda: report(host.out), threads=4)


def host_of(args: argparse.Namespace) -> Host:
    return Host(**{name: getattr(args, name) for name in Host.__dataclass_fields__})


def programs_of(host: Host, parts: Sequence[str]) -> list[Program]:
    """Programs of parts, each once: on two GPUs, all of them are two of them."""
    return list({program.name: program for part in parts for program in PARTS[part](host)}.values())


def report(out: Path) -> list[dict[str, Any]]:
    """Writes OUT/rows.json: a row of each result."""
    from llmtrain.bench.train.command import RESULTS, read_results

    found = Report(out / "rows.json")
    for folder in sorted(one for one in out.iterdir() if one.is_dir()):
        for result in read_results(folder / RESULTS).values():
            if "error" not in result:
                peer = read(out / f"torchtitan-{result['precision']}.json") if "llama" in result["model"] else {}
                theirs, speed = peer.get("tokens_per_second_per_gpu"), result["tokens_per_second_per_gpu"]
                found.add(
                    f"{result['model']}, {result['gpus']} GPUs, {result['precision']}",
                    tokens_per_s=speed,
                    mfu_percent=result["mfu"] and 100 * result["mfu"],
                    peak_gib=result["peak_gib"],
                    estimated_gib=estimated(result),
                    torchtitan_tokens_per_s=theirs,
                    torchtitan_x=theirs and speed / theirs,
                )
    for file in sorted(out.glob("context-*.json")):
        for row in read(file).get("rows", []):
            found.add(f"{file.stem}: {row['what']}", **{name: value for name, value in row.items() if name != "what"})
    if moved := read(out / "moving" / "moving.json"):
        found.add("a checkpoint that moves: largest difference of the loss", of_loss_percent=100 * moved["relative"])
    return found.rows


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def estimated(result: dict[str, Any]) -> float | None:
    """GiB of each GPU by `llmtrain describe`; None on a device that is not known."""
    from llmtrain.flops.peaks import find_device
    from llmtrain.plan.automatic import resolve_auto
    from llmtrain.plan.memory import estimate_memory
    from llmtrain.plan.parameters import parameter_sizes
    from llmtrain.schema.load import load_config

    device, gpus = find_device(result["gpu"]), result["gpus"]
    if device is None:
        return None
    file = min((ROOT / "yamls").glob(f"*/{result['model']}.yaml"))  # bench/ before pretrain/
    config = load_config(file, result["key"]["settings"], world_size=gpus)
    sizes = parameter_sizes(config)
    config = resolve_auto(config, sizes, gpus, gpus, device.memory_gb * 1e9).config
    return estimate_memory(config, sizes, gpus).total / 2**30
