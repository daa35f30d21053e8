"""Training steps of one model by one set of kernels and by another, side by side.

    python -m benchmarks steps FILE [a.b=c …] [--kernels ours public auto] [--out FILE.json]

ours: our Triton kernels in every block. public: PyTorch's FlashAttention-2, and state-spaces/mamba's Triton scan with
causal_conv1d if that is installed; what neither offers is compiled PyTorch, as the rest of the model. auto: the default of
`llmtrain train`. Each trains in a process of its own by the plain loop of `benchmarks overhead`
(bf16, random tokens, no trainer), the first once more at the end: the difference between its two figures is noise. The
public scan does not trace, so that its layers are compiled around it. Beside a step's time by the clock: the host's share of it,
until everything is launched, and the sum of the GPU's kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser
from benchmarks.programs.training.overhead import mfu, plain_loop
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

KERNELS = {
    "ours": {"attention": "triton", "gated_deltanet": "triton", "mamba2": "triton", "norm": "triton"},
    "public": {"attention": "sdpa:flash", "gated_deltanet": "fla", "mamba2": "mamba_ssm", "norm": "reference"},
    "auto": dict.fromkeys(("attention", "gated_deltanet", "mamba2", "norm"), "auto"),
    "reference": dict.fromkeys(("attention", "gated_deltanet", "mamba2", "norm"), "reference"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=["ours", "public", "auto"])
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures there, after each process")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)  # in this process, as JSON
    args = parser.parse(argv)
    configs = {name: with_kernels(args.file, args.overrides, name) for name in args.kernels}
    if args.in_process:
        print(json.dumps(measure(configs[args.kernels[0]])))
        return 0
    rows: list[dict[str, Any]] = []
    names = [*args.kernels, args.kernels[0]] if len(args.kernels) > 1 else args.kernels
    print(
        f"{'kernels':10} {'ms/step':>9} {'host ms':>9} {'GPU ms':>9} {'tokens/s':>10} {'MFU %':>6} {'GB':>6} {'x first':>8}",
        flush=True,
    )
    for name in names:
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "steps",
            "--in-process",
            args.file,
            *args.overrides,
            "--kernels",
            name,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(f"{name:10} failed: status {done.returncode}", flush=True)
            rows.append({"kernels": name, "failed": done.returncode})
        else:
            rows.append({"kernels": name, **json.loads(done.stdout.splitlines()[-1])})
            print(format_row(rows[-1], rows[0], configs[name]), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"config": args.file, "overrides": args.overrides, "steps": rows}, indent=1))
    return int(any("failed" in row for row in rows))


def with_kernels(file: str, overrides: list[str], name: str) -> Config:
    """The config with these kernels in each block and norm. Raises ConfigError."""
    backends = KERNELS[name]
    blocks = load_config(file, overrides).model.blocks
    kinds = {label: backends.get(block.type, backends["attention"]) for label, block in blocks.items()}
    norms = ["model.norm", *(f"model.blocks.{label}.norm" for label, block in blocks.items() if block.norm)]
    chosen = [f"{norm}.backend={backends['norm']}" for norm in norms]
    chosen += [f"model.blocks.{label}.backend={kind}" for label, kind in kinds.items()]
    return load_config(file, [*overrides, *chosen])


def measure(config: Config) -> dict[str, Any]:
    """seconds, host: of a step, medians; gpu: seconds of its kernels in a step; losses: of all steps; memory: bytes at the peak."""
    import torch

    public = any(block.backend == "mamba_ssm" for block in config.model.blocks.values())  # pyright: ignore[reportAttributeAccessIssue]
    loop = plain_loop(config, fullgraph=not public)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "seconds": statistics.median(loop.seconds),
        "host": statistics.median(loop.host),
        "gpu": loop.kernels,
        "losses": loop.losses,
        "memory": memory,
    }


def format_row(row: dict[str, Any], first: dict[str, Any], config: Config) -> str:
    rate = config.tokens_per_step / row["seconds"]
    ratio = f"{first['seconds'] / row['seconds']:8.3f}" if "seconds" in first else f"{'':8}"
    gpu = "" if row["gpu"] is None else f"{1000 * row['gpu']:.1f}"
    return (
        f"{row['kernels']:10} {1000 * row['seconds']:9.1f} {1000 * row['host']:9.1f} {gpu:>9} {rate:10,.0f} "
        f"{100 * mfu(config, rate):6.2f} {row['memory'] / 1e9:6.1f} {ratio}  loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
    )
