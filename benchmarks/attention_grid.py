"""Attention over shapes of published models and around them: every backend, forward and backward, as CSV.

    python -m benchmarks.attention_grid [--backends triton flex …] [--match TEXT] [--seconds 400] --out grid.csv

`llmtrain bench kernels` holds our kernel to bars at the shapes that it was tuned for. This shows the others: grouped heads, wide
heads, windows of many lengths. Milliseconds are medians of the device with a cold L2 cache (bench.kernels.measure), error is
the largest relative one of output and gradients against float64. What is to be compiled is compiled first, side by side.
A row is written as soon as it is measured; the same command again measures what the file lacks.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from llmtrain.bench.tune.attention import Case
from llmtrain.errors import exit_with
from llmtrain.kernels.attention.spec import AttentionSpec

COLUMNS: tuple[str, ...] = (
    "cell",
    "backend",
    "forward_ms",
    "backward_ms",
    "forward_tflops",
    "backward_tflops",
    "error",
    "failed",
)
BACKENDS = ("triton", "sdpa:cudnn", "sdpa:flash", "flex")


@dataclass(frozen=True)
class Shape(Case):
    """A case with a window and a softcap of its own."""

    window: int | None = None
    softcap: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        changes: dict[str, Any] = {"documents": self.packed}
        if self.window is not None:
            changes["sliding_window"] = self.window
        if self.softcap is not None:
            changes["softcap"] = self.softcap
        return replace(super().spec, **changes)

    @property
    def label(self) -> str:
        sizes = {"window": self.window, "softcap": self.softcap}
        features = [self.variant] * (self.variant != "plain")
        features += [f"{name} {size:g}" for name, size in sizes.items() if size is not None]
        heads = f"{self.spec.n_heads} on {self.spec.n_kv_heads}"
        return " ".join([f"{heads} x {self.head_dim}", f"T={self.seq_len}", *(features or ["plain"])])


def shapes() -> list[Shape]:
    def grouped(heads: int, kv_heads: int, head_dim: int, seq_len: int, variant: str = "plain", **more: Any) -> Shape:
        return Shape(head_dim, seq_len, variant, heads=heads, kv_heads=kv_heads, **more)

    llama = [
        grouped(32, 8, 128, 8192),
        grouped(32, 8, 128, 8192, window=4096),
        grouped(32, 8, 128, 8192, "documents"),
        grouped(32, 8, 128, 2048),
        grouped(32, 8, 64, 8192),
        grouped(32, 8, 64, 8192, window=1024),
        grouped(24, 8, 128, 4096),
        grouped(32, 1, 128, 4096),
        grouped(32, 8, 128, 8192, "documents", window=1024),
    ]
    wide = [
        grouped(32, 32, 224, 4096),
        grouped(16, 4, 256, 4096),
        grouped(16, 16, 192, 4096),
        grouped(16, 16, 160, 4096),
        grouped(8, 4, 256, 8192, window=1024, softcap=50.0),
        grouped(16, 4, 256, 4096, "documents"),
        grouped(16, 16, 192, 4096, window=1024),
        grouped(32, 32, 224, 4096, window=1024),
    ]
    narrow = [grouped(32, 32, head_dim, 4096, window=window) for head_dim in (80, 96, 112) for window in (None, 1024)]
    narrow += [grouped(32, 8, 96, 4096), grouped(32, 32, 96, 4096, "documents")]
    tuned = [
        grouped(2048 // head_dim, 2048 // head_dim, head_dim, 4096, variant)
        for head_dim in (128, 64)
        for variant in ("plain", "alibi", "window", "documents", "softcap")
    ]
    return [*llama, *wide, *narrow, *tuned]


def _run(shape: Shape, backend: str, timed: bool) -> dict[str, Any]:
    """A row of the CSV; without `timed`, only what compiling takes."""
    import torch

    from llmtrain.bench.kernels.cell import run_both
    from llmtrain.bench.kernels.measure import milliseconds
    from llmtrain.bench.tune.operations import relative_error
    from llmtrain.kernels import platform, registry

    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"cell": shape.label, "backend": backend}
    try:
        torch.compiler.reset()
        here = platform.detect()
        kernel: Any = registry.resolve("attention", backend, shape.spec, here).build(shape.spec, here)
        context = kernel.prepare(shape.seq_len, torch.device("cuda"), shape.ids("cuda"))
        qkv, dout = shape.tensors("cuda")
        leaves = [t.detach().requires_grad_() for t in qkv]

        def function(q, k, v):
            return kernel(q, k, v, context)

        found = run_both(function, leaves, dout)
        torch.cuda.synchronize()
        if not timed:
            return row
        exact = shape.exact(qkv, dout)
        error = max(relative_error(shape.first_group(a), b) for a, b in zip(found, exact, strict=True))
        del exact, found
        forward = milliseconds(lambda _: function(*leaves))
        backward = milliseconds(
            lambda y: torch.autograd.grad(y, leaves, dout, retain_graph=False), lambda: function(*leaves)
        )
        flops = shape.flops() / 1e9
        row |= {
            "forward_ms": f"{forward:.4f}",
            "backward_ms": f"{backward:.4f}",
            "forward_tflops": f"{flops / forward:.1f}",
            "backward_tflops": f"{2.5 * flops / backward:.1f}",
            "error": f"{error:.2e}",
        }
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    finally:
        torch.cuda.empty_cache()
    return row


def _compile(shapes_of: list[tuple[Shape, str]]) -> None:
    for shape, backend in shapes_of:
        _run(shape, backend, timed=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--match", default="", help="only cells whose label has this in it")
    parser.add_argument("--seconds", type=float, default=400, help="no measurement begins after them")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    done: set[tuple[str, str]] = set()
    if args.out.exists():
        done = {(row["cell"], row["backend"]) for row in csv.DictReader(args.out.open())}
    wanted = [(s, b) for s in shapes() for b in args.backends if args.match in s.label and (s.label, b) not in done]
    compiled = [(s, b) for s, b in wanted if not b.startswith("sdpa")]
    workers = min(14, len(os.sched_getaffinity(0)))
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1")
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        wait([pool.submit(_compile, [one]) for one in compiled])
    print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for shape, backend in wanted:
            if time.perf_counter() - began > args.seconds:
                print("out of time; the same command again measures the rest")
                break
            row = _run(shape, backend, timed=True)
            writer.writerow(row)
            file.flush()
            print(", ".join(str(value) for value in row.values() if value), flush=True)
    return 0


if __name__ == "__main__":
    exit_with(main)
