"""Loss of several models over tokens and over wall time: the same text in the same order, the same batch and learning rate.

    python -m benchmarks.convergence FILE… [--set a.b=c …] --seconds 90 --out FOLDER [--sources DIR…]

Each FILE, a run's YAML, is trained by `llmtrain train` in a process of its own for so many seconds of steps (compilation, the
first steps, not counted), one after another, on the text in --sources (default: Python's standard library) with a tokenizer
trained on it. FOLDER gets convergence.json, rewritten after each model, and convergence.png.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.figures import rounded
from llmtrain.errors import RunError, exit_with
from llmtrain.schema.load import load_config

COMPILING = 3
"""Steps that compile, of which the time does not count."""
VOCAB = 16_384
LOSS, SECONDS = "loss/train/cross_entropy", "throughput/step_seconds"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="further settings of every run")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--sources", nargs="+", default=["stdlib"])
    parser.add_argument("--max-bytes", type=int, default=150_000_000, help="of text")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    text = {"sources": args.sources, "out": str(args.out / "data"), "vocab_size": VOCAB, "seq_len": args.seq_len}
    common = [
        "data.train=null",
        "data.validation=null",
        f"data.prepare={json.dumps(text | {'max_bytes': args.max_bytes})}",
        f"data.seq_len={args.seq_len}",
        f"model.vocab_size={VOCAB}",
        *("train.duration=100000 steps", "train.global_batch_size=64", "train.microbatch_size=32"),
        *("optimizer.lr=1e-3", "optimizer.betas=[0.9, 0.95]", "optimizer.weight_decay=0.1"),
        "schedule={type: constant, warmup: 50 steps}",
        *("eval.interval=100000 steps", "checkpoint.interval=100000 steps"),
        *("logging.interval=1", "logging.tensorboard=false", "logging.wandb=null"),
        *args.set,
    ]
    found: dict[str, Any] = {}
    for file in args.files:
        name = Path(file).stem
        found[name] = rounded(train(file, common, args.out / name, args.seconds))
        content = {"device": _device(), "settings": common, "models": found}
        (args.out / "convergence.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
        plot(found, args.out / "convergence.png")
        one = found[name]
        print(
            f"{name}: {one['parameters'] / 1e6:.1f}M parameters, {one['tokens_per_second']:,.0f} tokens/s, "
            f"{one['tokens'][-1] / 1e6:.1f}M tokens, loss {_smoothed(one['loss'])[-1]:.3f}",
            flush=True,
        )
    return 0


def train(file: str, overrides: Sequence[str], run: Path, seconds: float) -> dict[str, Any]:
    """The curve of one run. Raises RunError for one that ends by itself."""
    config = load_config(file, overrides)
    command = [sys.executable, "-m", "llmtrain.cli", "train", file, *overrides, f"run_dir={run}", "--nproc", "1"]
    print(" ".join(command[3:5]), flush=True)
    process = subprocess.Popen(command)
    try:
        rows = _rows(run)
        while sum(row[SECONDS] for row in rows[COMPILING:]) < seconds:
            if process.poll() is not None:
                raise RunError(f"llmtrain train {file} ended with status {process.returncode}")
            time.sleep(1)
            rows = _rows(run)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)
    counted, per_step = rows[COMPILING:], config.tokens_per_step
    wall = list(accumulate(row[SECONDS] for row in counted))
    return {
        "parameters": _parameters(config),
        "tokens_per_second": per_step * len(counted) / wall[-1],
        "tokens": [per_step * row["step"] for row in counted],
        "seconds": wall,
        "loss": [row[LOSS] for row in counted],
    }


def _rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if LOSS in row and SECONDS in row]


def _parameters(config: Any) -> int:
    import torch

    from llmtrain.kernels import platform
    from llmtrain.models.hybrid import HybridLM

    with torch.device("meta"):
        return sum(p.numel() for p in HybridLM(config.model, platform=platform.cpu()).parameters())


def _device() -> str:
    from llmtrain.kernels import platform

    return platform.detect().device_name


def _smoothed(values: Sequence[float], half_life: float = 10.0) -> list[float]:
    """Exponential average without a bias to its beginning."""
    keep, total, weight, found = 0.5 ** (1 / half_life), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        found.append(total / weight)
    return found


def plot(found: dict[str, Any], file: Path) -> None:
    """Loss over tokens and over seconds of training, smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for name, one in found.items():
        label = f"{name}: {one['parameters'] / 1e6:.0f}M, {one['tokens_per_second'] / 1e3:,.0f}k tokens/s"
        axes[0].plot([n / 1e6 for n in one["tokens"]], _smoothed(one["loss"]), label=label)
        axes[1].plot(one["seconds"], _smoothed(one["loss"]))
    lowest = min(min(_smoothed(one["loss"])) for one in found.values())
    axes[0].set_ylim(lowest - 0.1, lowest + 2.5)
    axes[0].set_xlabel("million tokens")
    axes[1].set_xlabel("seconds of training")
    axes[0].set_ylabel("training loss, nats per token")
    axes[0].legend(fontsize=7)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    exit_with(main)
