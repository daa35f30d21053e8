"""Training steps of one model by one set of kernels and by another, side by side.

    python -m benchmarks steps FILE [a.b=c …] [--kernels ours public auto] [--out FILE.json]

ours: our Triton kernels in every block. public: PyTorch's FlashAttention-2, and state-spaces/mamba's Triton scan with
causal_conv1d if that is installed; what neither offers is compiled PyTorch, as the rest of the model. auto: the default of
`llmtrain train`. Each trains in a process of its own by the plain loop of `benchmarks overhead`
(bf16, random tokens, no trainer), the first once more at the end: the difference between its two figures is noise. The
public scan does not trace, so that its layers are compiled around it. Beside a step's time by the clock: the host's share of it,
until everything is launched, and the sum of the GPU's kernels.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.arguments import Parser
from benchmarks.harness.ranks import in_process
from benchmarks.harness.report import Report, Row
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
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=["ours", "public", "auto"])
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)  # in this process, as JSON
    args = parser.parse(argv)
    configs = {name: with_kernels(args.file, args.overrides, name) for name in args.kernels}
    if args.in_process:
        print(json.dumps(measure(configs[args.kernels[0]])))
        return 0
    report = Report(args.out)
    again = [f"{args.kernels[0]}, again"] if len(args.kernels) > 1 else []
    for what in [*args.kernels, *again]:
        name = what.removesuffix(", again")
        found = in_process("steps", args.file, *args.overrides, "--kernels", name)
        report.add(what, **(found if "failed" in found else figures(found, configs[name], report.rows)))
    return int(any("failed" in row for row in report.rows))


def figures(measured: dict[str, Any], config: Config, before: Sequence[Row]) -> Row:
    """Row of what `measure` found; first_x: times as fast as the first of the rows before."""
    row = {f"{name}_ms": value and 1e3 * value for name, value in measured.items() if name in ("step", "host", "gpu")}
    rate = config.tokens_per_step / measured["step"]
    first = before[0].get("step_ms") if before else None
    row |= {"tokens_per_s": rate, "mfu_percent": 100 * mfu(config, rate), "peak_gb": measured["memory"] / 1e9}
    return row | {"first_x": first and first / row["step_ms"], "losses_nats": measured["losses"]}


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
    """step, host: median seconds of a step; gpu: of its kernels in one; losses: of all steps; memory: bytes at the peak."""
    import torch

    public = any(block.backend == "mamba_ssm" for block in config.model.blocks.values())  # pyright: ignore[reportAttributeAccessIssue]
    loop = plain_loop(config, fullgraph=not public)
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    found = {"step": statistics.median(loop.seconds), "host": statistics.median(loop.host), "gpu": loop.kernels}
    return found | {"losses": loop.losses, "memory": memory}
