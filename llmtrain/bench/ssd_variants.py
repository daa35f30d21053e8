"""The Triton kernels of the scan under many launch parameters, beside the public ones, on one GPU in one run.

    python3 -m llmtrain.bench.ssd_variants [--cases 80x64x128 ...] [--kernels passing scan ...] [--seq-len 4096]
        [--peer FOLDER] [--json FILE]

A case is heads x head_dim x d_state, at 16,384 tokens. Every variant is compiled ahead in other processes, run, compared
with what the table's launch gives for the same chunk, and timed alone. Prints a table per kernel, fastest first; then
forward and backward whole, for the best of each chunk, and its error against float64, beside state-spaces/mamba's
(whose folder `mamba_ssm` lies in FOLDER).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from llmtrain.kernels import platform
from llmtrain.kernels.ssd import triton as scans
from llmtrain.kernels.ssd import triton_backward as backward
from llmtrain.kernels.ssd import triton_forward as forward
from llmtrain.kernels.ssd import triton_steps as time_steps
from llmtrain.kernels.ssd.reference import ReferenceSSD
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton_launch import HeadsLaunch, Launch, PassLaunch, WalkLaunch, default_launch

TOKENS = 16384
CASES = ("80x64x128", "80x64x64", "64x64x128")
KERNELS = ("walk", "passing", "scan", "pairs", "states")
CHUNKS = {"walk": (64,), "scan": (64,), "passing": (64,), "pairs": (64,), "states": (64,)}


def spec_of(case: str) -> SSDSpec:
    heads, head_dim, d_state = map(int, case.split("x"))
    return SSDSpec(heads, head_dim, d_state, 1, 256)


def inputs(spec: SSDSpec, seq_len: int, tokens: int = TOKENS) -> list[Tensor]:
    """x, dt, A, B, C, D, dt_bias as after a projection and a convolution, and the gradient of y."""
    g = torch.Generator("cuda").manual_seed(0)
    batch = tokens // seq_len

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    widths = [spec.n_heads * spec.head_dim, spec.n_groups * spec.d_state, spec.n_groups * spec.d_state]
    x, B, C = draw(batch, seq_len, sum(widths)).bfloat16().split(widths, dim=-1)
    x = x.unflatten(-1, (spec.n_heads, spec.head_dim))
    B, C = (t.unflatten(-1, (spec.n_groups, spec.d_state)) for t in (B, C))
    dt = draw(batch, seq_len, spec.n_heads).bfloat16()
    A = -(1 + 15 * torch.rand(spec.n_heads, generator=g, device="cuda"))
    D, dt_bias = draw(spec.n_heads), draw(spec.n_heads) - 4
    return [x, dt, A, B, C, D, dt_bias, draw(*x.shape).bfloat16()]


def candidates(kernel: str, chunk: int, few: bool) -> Iterator[PassLaunch | HeadsLaunch | WalkLaunch]:
    """Launches that may fit; what does not compile or launch is reported as such."""
    if kernel == "passing":
        for rows, columns, warps, stages in itertools.product((64, 128), (32, 64), (4, 8), (2, 3, 4)):
            if chunk * (rows + columns) * 2 * stages <= 200_000 and (rows, columns, warps) != (64, 32, 8):
                yield PassLaunch(rows, columns, stages, {"num_warps": warps})
    elif kernel == "walk":
        for stages in (2, 3):
            yield WalkLaunch(64, stages, {"num_warps": 4}, True)
    else:
        for programs, stages, fetched in itertools.product((1, 2, 4), (1, 2, 3), (True, False)):
            yield HeadsLaunch(programs, stages, {"num_warps": 8 if kernel == "states" else 4}, fetched)


class Bench:
    """One case: its tensors, and how to run one kernel alone."""

    def __init__(self, case: str, seq_len: int):
        self.spec = spec_of(case)
        self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias, self.dy = inputs(self.spec, seq_len)
        self.launch = default_launch(self.spec, platform.detect())
        self.made: dict[int, dict[str, Any]] = {}

    def of_chunk(self, chunk: int) -> dict[str, Any]:
        """What the kernels take from one another, for this chunk."""
        if chunk in self.made:
            return self.made[chunk]
        times, _ = time_steps.decays(self.dt, self.A, self.dt_bias, None, (None, None), chunk)
        few = PassLaunch(64, 32, 1, {"num_warps": 4})
        states, _ = forward.pass_states(self.x, self.B, times, None, None, chunk, False, "ieee", few)
        d_states, _ = forward.pass_states(self.dy, self.C, times, None, None, chunk, True, "ieee", few)
        vectors = torch.zeros((*times.shape[:3], 5, chunk), device="cuda")
        blocks = (4, self.x.shape[0], times.shape[2], self.spec.n_groups, chunk, chunk)
        d_pairs = torch.randn(blocks, device="cuda").to(self.B.dtype)
        self.made[chunk] = {
            "times": times,
            "states": states,
            "d_states": d_states,
            "vectors": vectors,
            "d_pairs": d_pairs,
        }
        return self.made[chunk]

    def runner(self, kernel: str, chunk: int, launch: Any) -> Callable[[], tuple[Tensor, ...]]:
        m = self.of_chunk(chunk)
        times, states, d_states, vectors = m["times"], m["states"], m["d_states"], m["vectors"]
        processors = self.launch.processors
        x, B, C, D, dy = self.x, self.B, self.C, self.D, self.dy
        if kernel == "walk":
            return lambda: forward.walk(x, B, C, D, times, None, None, chunk, False, "ieee", launch)[:2]
        if kernel == "passing":
            return lambda: forward.pass_states(dy, C, times, None, None, chunk, True, "ieee", launch)
        if kernel == "scan":
            return lambda: (forward.scan(x, B, C, D, times, None, states, chunk, "ieee", launch, processors),)
        if kernel == "pairs":
            pairs = (dy, x, B, C, D, times, None, d_states, vectors, chunk, "ieee", launch, processors)
            return lambda: (backward.through_pairs(*pairs)[0], vectors)
        through = (dy, x, B, C, times, None, m["d_pairs"], states, d_states, vectors, chunk, "ieee", launch, processors)
        return lambda: (*backward.through_states(*through), vectors)

    def whole(self, launch: Launch) -> tuple[Callable[[], tuple], Callable[[], tuple]]:
        """Forward and backward, as the operators run them."""
        tensors, options = (self.x, self.dt, self.A, self.B, self.C, self.D, self.dt_bias), launch.dump()
        settings = (None, None, options)
        states = scans.launch_forward(*tensors, None, None, *settings)[2]
        return (
            lambda: scans.launch_forward(*tensors, None, None, *settings),
            lambda: scans.launch_backward(self.dy, None, *tensors, None, None, states, *settings),
        )


def milliseconds(run: Callable[[], Any], rep: int = 80) -> float:
    return float(triton.testing.do_bench(run, warmup=20, rep=rep, return_mode="median"))  # type: ignore[arg-type]


def difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def compile_one(case: str, seq_len: int, kernel: str, chunk: int, launch: Any) -> str | None:
    try:
        Bench(case, seq_len).runner(kernel, chunk, launch)()
        torch.cuda.synchronize()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}".splitlines()[0][:90]
    return None


def errors(bench: Bench, launch: Launch) -> dict[str, float]:
    """Of the first row of the batch, its first 1,024 tokens, against the reference in float64."""
    n = 1024
    tensors = [t[:1, :n] if t.ndim >= 3 else t for t in (bench.x, bench.dt, bench.A, bench.B, bench.C, bench.D)]
    leaves = [t.detach().requires_grad_() for t in (*tensors, bench.dt_bias)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    dy = bench.dy[:1, :n]
    y, *_ = scans.ssd_forward(*leaves, None, None, None, None, launch.dump())
    found = (y, *torch.autograd.grad(y, leaves, dy))
    exact, _ = ReferenceSSD(bench.spec)(*wide)
    right = (exact, *torch.autograd.grad(exact, wide, dy.double()))
    names = ("y", "x", "dt", "A", "B", "C", "D", "dt_bias")
    return {k: difference((a,), (b,)) for k, a, b in zip(names, found, right, strict=True)}


def peer(bench: Bench) -> dict[str, tuple[float, float]]:
    """state-spaces/mamba's forward and backward, best of chunk 128 and 256."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    found = {}
    tensors = [t.detach().requires_grad_() for t in (bench.x, bench.dt, bench.A, bench.B, bench.C)]
    more = {"D": bench.D.detach().requires_grad_(), "dt_bias": bench.dt_bias.detach().requires_grad_()}
    leaves = [*tensors, *more.values()]
    for chunk in (128, 256):

        def run(chunk: int = chunk) -> Tensor:
            return mamba_chunk_scan_combined(*tensors, chunk, **more, dt_softplus=True)

        y = run()
        found[f"mamba_ssm {chunk}"] = (
            milliseconds(run, 200),
            milliseconds(lambda y=y: torch.autograd.grad(y, leaves, bench.dy, retain_graph=True), 300),
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--top", type=int, default=4)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here = platform.detect()
    print(f"{here.device_name}, torch {torch.__version__}, triton {triton.__version__}, bf16, {TOKENS} tokens")
    tasks = [
        (case, options.seq_len, kernel, chunk, launch)
        for case in options.cases
        for kernel in options.kernels
        for chunk in CHUNKS[kernel]
        for launch in candidates(kernel, chunk, options.few)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        problems = list(pool.map(compile_one, *zip(*tasks, strict=True)))
    print(f"{len(tasks)} variants, {sum(p is not None for p in problems)} do not run", flush=True)

    results: dict[str, Any] = {}
    for case in options.cases:
        bench = Bench(case, options.seq_len)
        best: dict[tuple[str, int], tuple[float, Any]] = {}
        results[case] = {"kernels": []}
        for kernel in options.kernels:
            for chunk in CHUNKS[kernel]:
                rows, expected = [], None
                for task, problem in zip(tasks, problems, strict=True):
                    if (task[0], *task[2:4]) != (case, kernel, chunk):
                        continue
                    row = {"kernel": kernel, "chunk": chunk, "launch": asdict(task[4]), "problem": problem}
                    if problem is None:
                        run = bench.runner(kernel, chunk, task[4])
                        found = tuple(t.detach().clone() for t in run())
                        expected = expected or found
                        row |= {"ms": milliseconds(run), "difference": difference(found, expected)}
                    rows.append((row.get("ms", 1e9), task[4], row))
                rows.sort(key=lambda row: row[0])
                results[case]["kernels"] += [row[2] for row in rows]
                for ms, _, row in rows[: options.top]:
                    what = row["problem"] or f"{ms:7.3f} ms  difference {row['difference']:.1e}"
                    print(f"  {case} {kernel:16} chunk {chunk:3} {json.dumps(row['launch'])} {what}", flush=True)
                if rows and rows[0][2]["problem"] is None:
                    best[kernel, chunk] = rows[0][:2]
        whole = {}
        base = bench.launch
        for chunk in CHUNKS["walk"]:
            keys = [("walk", chunk), ("passing", 64), ("pairs", 64), ("states", 64)]
            if not all(key in best for key in keys):
                continue
            parts = {kernel: best[kernel, c][1] for kernel, c in keys}
            launch = replace(base, chunk=chunk, chunk_backward=64, **parts)
            for keep in (False, True) if chunk == 64 else (False,):
                launch = replace(launch, keep_states=keep)
                for seq_len in (2048, 4096, 8192):
                    run = bench if seq_len == options.seq_len else Bench(case, seq_len)
                    whole[f"ours {chunk}{' kept' * keep} {seq_len}"] = tuple(
                        milliseconds(run, 200) for run in run.whole(launch)
                    )
                print(f"  {case} {chunk} errors", errors(bench, launch), flush=True)
        if options.peer:
            sys.path.insert(0, str(options.peer))
            whole |= peer(bench)
        for name, (f, b) in whole.items():
            print(f"  {case} {name:18} {f:7.3f} | {b:7.3f} ms  sum {f + b:7.3f}", flush=True)
        results[case]["whole"] = whole
        if options.json:
            options.json.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
        del bench
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
