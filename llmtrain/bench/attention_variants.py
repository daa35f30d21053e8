"""The Triton attention kernels under many launch parameters, beside the public kernels, on one GPU in one run.

    python3 -m llmtrain.bench.attention_variants [--cases 64-2048 128-8192 ...] [--kernels forward dq dkdv]
        [--quick] [--no-peers] [--json FILE]

A case is a head_dim, an option or none, and a sequence length, at 16,384 tokens and about 2048 channels. Every variant is
compiled ahead in other processes, run, compared with the reference in float64 on one group of heads, and timed. Prints
a table per kernel, fastest first, then the best of each against FlashAttention-2, cuDNN and compiled FlexAttention.
TFLOP/s: 4 head_dim per visible pair forward, 2.5 x that backward, of which dq and dkdv are two parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from llmtrain.bench.attention_peers import peers
from llmtrain.kernels import platform
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.reference import ReferenceAttention, score_bias
from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes
from llmtrain.kernels.attention.triton import Call
from llmtrain.kernels.attention.triton_launch import KERNELS, Kernel, Launch, choose

TOKENS, CHANNELS = 16384, 2048
LENGTHS = (2048, 4096, 8192)
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "alibi": {"alibi_max_bias": 8.0},
    "window": {"sliding_window": 1024},
    "packed": {},
    "gqa": {},
    "softcap": {"softcap": 30.0},
}
DOCUMENT = 700  # tokens, of the packed case


@dataclass(frozen=True)
class Case:
    head_dim: int
    option: str
    seq_len: int

    @property
    def label(self) -> str:
        return "-".join(filter(None, (str(self.head_dim), self.option, str(self.seq_len))))

    @property
    def spec(self) -> AttentionSpec:
        heads = 16 if self.head_dim >= 128 else CHANNELS // self.head_dim
        kv_heads = heads // 4 if self.option == "gqa" else heads
        return AttentionSpec(heads, kv_heads, self.head_dim, self.head_dim**-0.5, **OPTIONS[self.option])

    @property
    def batch(self) -> int:
        return TOKENS // self.seq_len

    def ids(self, device: str) -> Tensor | None:
        if self.option != "packed":
            return None
        return (torch.arange(self.seq_len, device=device) // DOCUMENT).expand(self.batch, -1)

    def flops(self) -> float:
        """Of the forward pass."""
        spec = self.spec
        pairs = spec.pairs(self.seq_len, causal=True)
        if self.option == "packed":
            whole, rest = divmod(self.seq_len, DOCUMENT)
            pairs = whole * spec.pairs(DOCUMENT, causal=True) + spec.pairs(rest, causal=True)
        return 4.0 * pairs * spec.n_heads * spec.head_dim * self.batch

    def tensors(self, device: str = "cuda") -> tuple[list[Tensor], Tensor]:
        """q, k, v as slices of one projection, and the gradient of the output."""
        spec, g = self.spec, torch.Generator(device).manual_seed(0)
        heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

        fused = random(self.batch, self.seq_len, sum(heads) * spec.head_dim)
        slices = fused.split([h * spec.head_dim for h in heads], dim=-1)
        qkv = [t.unflatten(-1, (h, spec.head_dim)).requires_grad_() for t, h in zip(slices, heads, strict=True)]
        return qkv, random(self.batch, self.seq_len, spec.n_heads, spec.head_dim)


CASES = {
    case.label: case
    for case in [
        *(Case(d, "", T) for d in (64, 128) for T in LENGTHS),
        *(Case(d, option, 4096) for d in (64, 128) for option in OPTIONS if option),
        *(Case(d, "", 4096) for d in (160, 224, 80)),
    ]
}


def candidates(kernel: Kernel, head_dim: int, quick: bool) -> Iterator[Launch]:
    """Tiles that may fit; what does not compile or launch is reported as such."""
    one_part = head_dim & (head_dim - 1) == 0
    tiles = {
        "forward": ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)),
        "dq": ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128)),
        "dkdv": ((32, 64), (64, 64), (128, 64), (32, 128), (64, 128), (128, 128)),
    }[kernel]
    for (m, n), warps, stages in itertools.product(tiles, (4, 8), (2,) if quick else (2, 3)):
        rows = n if kernel == "dkdv" else m
        if (rows == 64 and warps == 8) or (head_dim > 128 and m * n > 64 * 64):
            continue
        yield Launch(m, n, warps, stages, one_part)
        if warps == 4 and rows == 64 and not quick:
            yield Launch(m, n, warps, stages, one_part, registers=168)


class Bench:
    """One case: its tensors, what is right, and how to run one kernel alone."""

    def __init__(self, case: Case):
        self.case, self.spec = case, case.spec
        (self.q, self.k, self.v), self.dout = case.tensors()
        spec, ids = self.spec, case.ids("cuda")
        packed = None if ids is None else documents(ids)
        slopes = None
        if spec.alibi_max_bias is not None:
            slopes = torch.tensor(alibi_slopes(spec.n_heads, spec.alibi_max_bias), device="cuda")
        bounds = (packed.starts, packed.ends) if packed else (None, None)
        self.settings = (spec.scale, True, spec.sliding_window, spec.softcap, slopes, *bounds)
        self.out, self.lse = self.call({}).forward()
        self.delta = torch.empty_like(self.lse)

    def call(self, launches: dict[Kernel, Launch]) -> Call:
        q, k, v = (t.detach() for t in (self.q, self.k, self.v))
        return Call(q, k, v, *self.settings, launches=launches)

    def runner(self, kernel: Kernel, launch: Launch | None) -> Callable[[], dict[str, Tensor]]:
        call = self.call({} if launch is None else {kernel: launch})

        def run() -> dict[str, Tensor]:
            if kernel == "forward":
                return {"out": call.forward()[0]}
            if kernel == "dq":
                return {"dq": call.dq(self.out, self.lse, self.dout, None, self.delta)}
            return dict(zip(("dk", "dv"), call.dkdv(self.lse, self.dout, self.delta), strict=True))

        return run

    def exact(self) -> dict[str, Tensor]:
        """In float64, of the last sequence's first key head and the query heads that share it."""
        spec, group = self.spec, self.spec.n_heads // self.spec.n_kv_heads
        bias = score_bias(spec, self.case.seq_len, torch.device("cuda"))[:group]
        ids = self.case.ids("cuda")
        if ids is not None:
            bias = bias.masked_fill(ids[-1][:, None] != ids[-1][None, :], float("-inf"))
        one = AttentionSpec(group, 1, spec.head_dim, spec.scale, softcap=spec.softcap, dtype="float64")
        pieces = (self.q[-1:, :, :group], self.k[-1:, :, :1], self.v[-1:, :, :1])
        leaves = [t.detach().double().requires_grad_() for t in pieces]
        out = ReferenceAttention(one)(*leaves, bias)
        gradients = torch.autograd.grad(out, leaves, self.dout[-1:, :, :group].double())
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def error(found: Tensor, exact: Tensor) -> float:
    piece = found[-1:, :, : exact.shape[2]].double()
    return float((piece - exact).norm() / exact.norm())


def compile_one(label: str, kernel: Kernel, launch: Launch) -> str | None:
    """Runs it once, in a process of its own pool: what is compiled lies in Triton's cache on disk then."""
    try:
        Bench(CASES[label]).runner(kernel, launch)()
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}".splitlines()[0][:100]
    return None


def milliseconds(run: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(run, warmup=30, rep=150, return_mode="median"))  # type: ignore[arg-type]


def variants(bench: Bench, kernel: Kernel, launches: list[Launch], problems: dict) -> list[dict[str, Any]]:
    """Rows of the table, fastest first."""
    exact, rows = bench.exact(), []
    for launch in launches:
        if problem := problems.get((bench.case.label, kernel, launch)):
            rows.append({"launch": asdict(launch), "problem": problem})
            continue
        run = bench.runner(kernel, launch)
        try:
            errors = {name: error(found, exact[name]) for name, found in run().items()}
            rows.append({"launch": asdict(launch), "ms": milliseconds(run), "error": max(errors.values())})
        except Exception as problem:
            rows.append({"launch": asdict(launch), "problem": f"{type(problem).__name__}: {problem}"[:100]})
    return sorted(rows, key=lambda row: row.get("ms", float("inf")))


def describe(row: dict[str, Any], flops: float) -> str:
    launch = row["launch"]
    tile = f"{launch['block_m']:4} x {launch['block_n']:<4} warps {launch['warps']:2} stages {launch['stages']}"
    tile += " described" if launch["described"] else "          "
    if "problem" in row:
        return f"    {tile}  {row['problem']}"
    wrong = "" if row["error"] < 0.01 else "  WRONG"
    return f"    {tile} {row['ms']:8.3f} ms {flops / row['ms'] / 1e9:7.0f} TFLOP/s  error {row['error']:.2e}{wrong}"


def compare(bench: Bench, best: dict[Kernel, dict[str, Any]], with_peers: bool) -> dict[str, Any]:
    """Forward and backward of the best variants against the public kernels."""
    flops = bench.case.flops()
    times = {"ours": (best["forward"]["ms"], best["dq"]["ms"] + best["dkdv"]["ms"])}
    inputs = [bench.q, bench.k, bench.v]
    for name, function in peers(bench.spec, bench.case.seq_len, bench.case.ids("cuda")).items() if with_peers else ():
        try:
            out = function(*inputs)
            forward = milliseconds(lambda function=function: function(*inputs))
            backward = milliseconds(
                lambda out=out: torch.autograd.grad(out, inputs, bench.dout, retain_graph=True),
            )
            times[name] = (forward, backward)
        except Exception as problem:
            print(f"    {name}: {type(problem).__name__}: {problem}".splitlines()[0][:140])
    for name, (forward, backward) in times.items():
        rates = f"{flops / forward / 1e9:5.0f} | {2.5 * flops / backward / 1e9:5.0f} TFLOP/s"
        ratio = (forward + backward) / sum(times["ours"])
        print(f"    {name:8} {forward:8.3f} | {backward:8.3f} ms {rates}   ours is {ratio:.2f} x as fast")
    return {name: {"forward_ms": f, "backward_ms": b} for name, (f, b) in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--quick", action="store_true", help="two stages only")
    parser.add_argument("--table", action="store_true", help="the table's launches only")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--top", type=int, default=6, help="rows to print per kernel")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    here = platform.detect()
    print(f"{here.device_name}, torch {torch.__version__}, triton {triton.__version__}, bf16, {TOKENS} tokens")

    tasks: dict[tuple[str, Kernel], list[Launch]] = {}
    for label, kernel in itertools.product(options.cases, KERNELS):
        first = choose(kernel, CASES[label].head_dim, "bfloat16", here)
        more = candidates(kernel, CASES[label].head_dim, options.quick)
        tried = kernel in options.kernels and not options.table
        tasks[label, kernel] = list(dict.fromkeys([first, *more])) if tried else [first]
    flat = [(*key, launch) for key, launches in tasks.items() for launch in launches]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        problems = dict(zip(flat, pool.map(compile_one, *zip(*flat, strict=True)), strict=True))

    results: dict[str, Any] = {}
    for label in options.cases:
        bench, best = Bench(CASES[label]), {}
        flops = bench.case.flops()
        print(f"{label}: {flops / 1e9:.0f} GFLOP forward", flush=True)
        results[label] = {}
        for kernel in KERNELS:
            bench.runner("dq", None)()  # delta, for dkdv
            rows = variants(bench, kernel, tasks[label, kernel], problems)
            results[label][kernel], best[kernel] = rows, rows[0]
            share = {"forward": 1.0, "dq": 2.5 * 3 / 7, "dkdv": 2.5 * 4 / 7}[kernel]
            print(f"  {kernel}")
            for row in rows[: options.top]:
                print(describe(row, share * flops), flush=True)
        if all("ms" in row for row in best.values()):
            results[label]["compared"] = compare(bench, best, not options.no_peers)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
        del bench
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
