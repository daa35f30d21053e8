"""The Triton kernels around the scan under many launch parameters, beside PyTorch, on one GPU.

    python3 -m llmtrain.bench.around_variants FILE [--operations conv1d gated_norm] [--directions forward backward]

The convolution with SiLU: 5376 channels (5120 + 2 * 128), a slice of a projection 10,576 wide, 8 x 2048 and 2 x 8192
tokens. The gated norm: 5120 channels in one group, 16,384 tokens. bf16. Every variant is compiled ahead, in threads,
compared with the reference in float64, and timed: medians, of the whole backward with its second sum. Beside them the
reference under torch.compile, and F.conv1d. Prints a table, fastest first; FILE gets one JSON line per variant.
GB/s: of what must be read and written, once; 4270 is what a copy reaches on an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.bench.entry import end_with
from llmtrain.kernels import platform
from llmtrain.kernels.conv1d import aten, triton_kernels
from llmtrain.kernels.conv1d import reference as conv_reference
from llmtrain.kernels.conv1d.triton_launch import Walk
from llmtrain.kernels.gated_norm import triton_kernels as norm_kernels
from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.gated_norm.triton_launch import Tile

COPY = 4270.0  # GB/s
WRONG = 0.01  # relative error in bf16
DEVICE = "cuda"

Outputs = tuple[Tensor, ...]


@dataclass
class Case:
    """One operation on one shape. leaves: its inputs; numbers: elements of one large tensor."""

    operation: str
    label: str
    leaves: list[Tensor]
    dy: Tensor
    peers: dict[str, Callable[..., Tensor]]
    ours: Callable[[str, Any], Callable[[], Outputs]]
    tensors: dict[str, int]
    """Large tensors that each direction must read and write."""

    @property
    def numbers(self) -> int:
        return self.dy.numel()

    def exact(self) -> dict[str, Outputs]:
        """Of the first peer, the reference, in float64."""
        leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        y = next(iter(self.peers.values()))(*leaves)
        return {"forward": (y.detach(),), "backward": torch.autograd.grad(y, leaves, self.dy.double())}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def conv_case(batch: int, seq_len: int, d_inner: int = 5120, d_bc: int = 256, heads: int = 80) -> Case:
    channels = d_inner + d_bc
    x = random(batch, seq_len, 2 * d_inner + d_bc + heads)[..., d_inner : d_inner + channels].detach()
    weight, bias, dy = random(channels, 4) * 0.5, random(channels), random(batch, seq_len, channels)

    def ours(direction: str, walk: Walk) -> Callable[[], Outputs]:
        if direction == "forward":
            return lambda: (triton_kernels.forward(x, weight, bias, None, walk),)
        return lambda: _present(triton_kernels.backward(dy, x, weight, bias, None, walk))

    compiled = torch.compile(conv_reference.causal_conv1d_silu, dynamic=False)
    peers = {
        "reference": conv_reference.causal_conv1d_silu,
        "torch.compile": compiled,
        "F.conv1d": aten.causal_conv1d_silu,
    }
    label = f"conv1d {batch} x {seq_len} x {channels}"
    return Case("conv1d", label, [x, weight, bias], dy, peers, ours, {"forward": 2, "backward": 3})


def norm_case(tokens: int, dim: int = 5120) -> Case:
    spec = GatedNormSpec(dim, 1, 1e-5)
    x, dy, weight = random(tokens, dim), random(tokens, dim), 1 + 0.1 * random(dim)
    z = random(tokens, 2 * dim + 336)[:, :dim].detach()
    wide = x.float() * F.silu(z.float())
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
    del wide

    def ours(direction: str, tile: Tile) -> Callable[[], Outputs]:
        if direction == "forward":
            return lambda: norm_kernels.forward(x, z, weight, 1, spec.eps, False, tile)[:1]
        return lambda: norm_kernels.backward(dy, x, z, weight, r, False, tile)

    reference = ReferenceGatedNorm(spec).__call__
    peers = {"reference": reference, "torch.compile": torch.compile(reference, dynamic=False)}
    label = f"gated_norm {tokens} x {dim}"
    return Case("gated_norm", label, [x, z, weight], dy, peers, ours, {"forward": 3, "backward": 5})


def _present(tensors: tuple[Tensor | None, ...]) -> Outputs:
    return tuple(t for t in tensors if t is not None)


def cases() -> Iterator[Case]:
    """One at a time: the float64 reference takes a few GB."""
    yield conv_case(8, 2048)
    yield conv_case(2, 8192)
    yield norm_case(16384)


def variants(operation: str, direction: str) -> list[Walk] | list[Tile]:
    """The table's first, then what might be better. A warp is 32 lanes here; AMD's 64 hold half as much each."""
    if operation == "gated_norm" and direction == "forward":
        rows = [(1024, 4, run, 1) for run in (8, 1, 4, 16, 32)]
        rows += [(1024, 8, 8, 1), (512, 2, 8, 1), (512, 4, 8, 1), (2048, 8, 8, 1), (8192, 16, 8, 1)]
        rows += [(1024, 4, 8, 2), (1024, 4, 16, 3)]
        return [Tile(columns, warps, run, 1, stages) for columns, warps, run, stages in rows]
    if operation == "gated_norm":
        rows = [(1024, 4, run, 1) for run in (32, 8, 16, 64)]
        rows += [(columns, warps, run, 1) for columns, warps in ((1024, 8), (2048, 8)) for run in (16, 32)]
        rows += [(512, 4, 32, 1), (1024, 16, 32, 1), (8192, 16, 32, 1), (8192, 8, 16, 1), (1024, 4, 32, 2)]
        return [Tile(columns, warps, run, 1, stages) for columns, warps, run, stages in rows]
    if direction == "forward":
        return [
            *(Walk(256, 4, run, 4, 4) for run in (64, 16, 32, 128)),
            *(Walk(256, 4, run, 8, 4) for run in (32, 64)),
            *(Walk(128, 4, run, 4, 4) for run in (32, 64)),
            Walk(128, 4, 64, 8, 4),
            Walk(256, 1, 64, 4, 1),
            Walk(256, 2, 64, 4, 2),
            Walk(512, 4, 64, 4, 8),
            Walk(64, 16, 32, 4, 4),
            Walk(256, 4, 64, 4, 4, stages=2),
            Walk(256, 4, 64, 4, 4, stages=3),
            Walk(128, 4, 64, 4, 4, stages=3),
        ]
    return [
        *(Walk(128, 4, run, 4, 4) for run in (64, 32, 128, 256)),
        *(Walk(256, 4, run, 4, 4) for run in (32, 64, 128)),
        *(Walk(128, 4, run, 3, 4) for run in (48, 96)),
        *(Walk(64, 4, run, 4, 4) for run in (64, 128)),
        Walk(128, 4, 64, 8, 4),
        Walk(128, 8, 32, 4, 8),
        Walk(128, 2, 64, 4, 2),
        Walk(128, 1, 128, 4, 1),
        Walk(64, 8, 64, 4, 4),
        Walk(128, 4, 64, 4, 4, stages=2),
        Walk(64, 4, 64, 4, 4, stages=2),
    ]


def attempt(run: Callable[[], Outputs]) -> str | None:
    """Compiles and runs it once; what is wrong, if anything."""
    try:
        run()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}".splitlines()[0][:100]
    return None


def milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    """Median. The GPU sleeps first, so that launches queue up and their cost on the host is not measured."""
    for _ in range(3):
        run()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def error(found: Outputs, exact: Outputs) -> float:
    """The largest of the outputs' errors, each relative and in the norm of the whole."""
    assert len(found) == len(exact)
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def peer(function: Callable[..., Tensor], case: Case, direction: str) -> Callable[[], Outputs]:
    leaves = [t.detach().requires_grad_(direction == "backward") for t in case.leaves]
    if direction == "forward":
        return lambda: (function(*leaves),)
    y = function(*leaves)
    return lambda: torch.autograd.grad(y, leaves, case.dy, retain_graph=True)


def measured(run: Callable[[], Outputs], case: Case, direction: str, exact: Outputs) -> dict[str, Any]:
    try:
        wrong = error(run(), exact)
        ms = milliseconds(run)
    except Exception as problem:
        return {"problem": f"{type(problem).__name__}: {problem}".splitlines()[0][:100]}
    rate = case.tensors[direction] * case.numbers * 2 / ms / 1e6
    return {"ms": ms, "GB/s": rate, "of copy": rate / COPY, "error": wrong, "right": wrong < WRONG}


def describe(row: dict[str, Any]) -> str:
    name = row["name"] if row["launch"] is None else " ".join(f"{k} {v}" for k, v in row["launch"].items())
    if "problem" in row:
        return f"  {name:60} {row['problem']}"
    wrong = "" if row["right"] else "  WRONG"
    return f"  {name:60} {row['ms']:7.4f} ms {row['GB/s']:6.0f} GB/s {row['of copy']:5.0%}  error {row['error']:.1e}{wrong}"


def bench(case: Case, directions: list[str], pool: ThreadPoolExecutor) -> Iterator[dict[str, Any]]:
    exact = case.exact()
    runs = {d: [(v, case.ours(d, v)) for v in variants(case.operation, d)] for d in directions}
    flat = [run for of_direction in runs.values() for _, run in of_direction]
    problems = dict(zip(map(id, flat), pool.map(attempt, flat), strict=True))
    for direction in directions:
        rows = []
        for launch, run in runs[direction]:
            row = {"case": case.label, "direction": direction, "name": "ours", "launch": asdict(launch)}
            problem = problems[id(run)]
            rows.append(row | ({"problem": problem} if problem else measured(run, case, direction, exact[direction])))
        for name, function in list(case.peers.items())[1:]:
            row = {"case": case.label, "direction": direction, "name": name, "launch": None}
            rows.append(row | measured(peer(function, case, direction), case, direction, exact[direction]))
        print(f"{case.label}, {direction}")
        for row in sorted(rows, key=lambda row: row.get("ms", float("inf"))):
            print(describe(row), flush=True)
        yield from rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--operations", nargs="+", default=["conv1d", "gated_norm"], choices=["conv1d", "gated_norm"])
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    print(f"{platform.detect().device_name}, torch {torch.__version__}, bf16")
    with options.file.open("w", encoding="utf-8") as out, ThreadPoolExecutor(16) as pool:
        for case in cases():
            if case.operation not in options.operations:
                continue
            torch._dynamo.reset()
            for row in bench(case, options.directions, pool):
                out.write(json.dumps(row) + "\n")
                out.flush()
    return 0


if __name__ == "__main__":
    end_with(main)
