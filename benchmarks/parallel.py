"""Training steps of one model on several GPUs, by meshes of context and tensor parallelism, and the scan's communication alone.

    python -m benchmarks.parallel FILE [a.b=c …] --nproc 2 [--steps 4] [--longest] [--out FILE.json]
    python -m benchmarks.parallel --scan --nproc 2 [--out FILE.json]

FILE is trained on random tokens as train.parallel, train.sharding and the rest say, by the model, the sharding and the clipping of
`llmtrain train`, without trainer and loader. A row has the tokens/s per GPU, MFU by causal FLOPs, the memory at the peak, the
kernels that attention took, and the seconds from the start on at which the model was ready and at which each step ended.
longest: also twice the sequence, and so on, until the memory is not enough. scan: a Mamba-2 scan over 131,072 tokens that the ranks
share, forward and backward, with its all-gather and with the same bytes copied on the rank itself, in turn: the difference is
exposed communication. Ranks are processes of this machine; without GPUs they run on the CPU, which is good for a try.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.ranks import Training, on_ranks
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.errors import exit_with
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

WARMUP = 2
SCANS = 8  # one behind the other, as the layers of a step
START = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="timed ones")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--tokens", type=int, default=131_072, help="with --scan")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_intermixed_args()
    if (args.file is None) != args.scan:
        parser.error("give a FILE, or --scan")
    if args.rank:
        row = scan(args.tokens, args.steps) if args.scan else steps(load_config(args.file, args.overrides), args.steps)
        if world_from_environment().is_main:
            print(json.dumps(row), flush=True)
        return 0
    rows: list[dict[str, Any]] = []
    overrides = [*args.overrides]
    while True:
        what = ["--scan", "--tokens", str(args.tokens)] if args.scan else [args.file, *overrides]
        row = on_ranks(args.nproc, "benchmarks.parallel", "--steps", str(args.steps), *what)
        rows.append({"file": args.file, "overrides": overrides, "nproc": args.nproc, **row})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(rows, indent=1))
        if "failed" in row or not args.longest:
            return int("failed" in rows[0])
        seq_len = 2 * row["seq_len"]
        overrides = [*args.overrides, f"data.seq_len={seq_len}", f"model.max_seq_len={seq_len}"]


def steps(config: Config, count: int) -> dict[str, Any]:
    """Steps of one microbatch per group, every rank calling this."""
    import torch

    made = Training(config)
    cost, size = made.cost, config.train.microbatch_size if isinstance(config.train.microbatch_size, int) else 1
    torch.manual_seed(made.world.data_rank)
    ids = torch.randint(config.model.vocab_size, (size, config.data.seq_len))
    part = made.own(ids, ids.roll(-1, 1))
    synchronize(made.device)
    if made.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, ends = [], [], [time.perf_counter() - START]
    for step in range(WARMUP + count):
        synchronize(made.device)
        began = time.perf_counter()
        loss = made.step(part)
        synchronize(made.device)
        losses.append(float(loss))
        ends.append(time.perf_counter() - START)
        print(f"step {step + 1} of {WARMUP + count} ended after {ends[-1]:.1f} s", file=sys.stderr, flush=True)
        if step >= WARMUP:
            seconds.append(time.perf_counter() - began)
    step_seconds = statistics.median(seconds)
    per_gpu = ids.numel() * made.world.data_size / made.world.size / step_seconds
    return {
        "device": torch.cuda.get_device_name() if made.device.type == "cuda" else "CPU",
        "seq_len": config.data.seq_len,
        "step_seconds": step_seconds,
        "tokens_per_second_per_gpu": per_gpu,
        "mfu_causal": per_gpu * cost.causal / cost.peak.flops if cost.peak.flops else None,
        "memory": torch.cuda.max_memory_allocated() if made.device.type == "cuda" else None,
        "attention": sorted(attention_backends(made.model)),
        "losses": losses,
        "seconds": seconds,
        "ready_and_steps_ended_after": ends,
    }


def attention_backends(model: Any) -> set[str]:
    """The kernels of attention that take part in a step."""
    from llmtrain.models.mixers.attention import Attention

    found = (module for module in model.modules() if isinstance(module, Attention))
    return {(one.segment_backend or one.backend).name for one in found}


def scan(tokens: int, count: int) -> dict[str, Any]:
    """Seconds of a scan of Zamba2-2.7B's shape that all ranks share, with and without communication. Every rank calls this."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from llmtrain.kernels import registry
    from llmtrain.kernels.platform import detect
    from llmtrain.kernels.ssd.spec import SSDSpec
    from llmtrain.models.mixers.mamba2_segments import SegmentScan
    from llmtrain.models.segments import Segments

    device = initialize()
    world, group = world_from_environment(), dist.group.WORLD
    assert group is not None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = SSDSpec(80, 64, 64, 1, 256, None, str(dtype).removeprefix("torch."))
    kernel = registry.resolve("ssd", "auto", spec, detect()).build(spec, detect())
    segments = Segments(world.rank, world.size, group.group_name)
    context = SegmentScan.of(segments, tokens, device, None, 4)
    n = tokens // world.size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    x, dt, B, C = draw(1, n, 80, 64), draw(1, n, 80), draw(1, n, 1, 64), draw(1, n, 1, 64)
    A, D, dt_bias = (-torch.rand(80, device=device), *(torch.rand(80, device=device) for _ in "Db"))

    ones = torch.ones_like(x)

    def layer(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
        return context.scan(kernel, spec, x, dt, A, B, C, D, dt_bias)

    if device.type == "cuda":
        layer = torch.compile(layer, fullgraph=True, dynamic=False)

    def run() -> float:
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(SCANS):
            layer(x, dt, B, C).backward(ones)
        synchronize(device)
        return (time.perf_counter() - began) / SCANS

    def copied(own: torch.Tensor, dim: int, group: str) -> torch.Tensor:
        return torch.cat([own] * world.size)

    alone = "llmtrain.models.segments.all_gather_tensor_autograd"
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (WARMUP + 3 * count)):
        with patch(alone, copied) if turn % 2 else nullcontext():
            times[turn % 2 == 0].append(run())
    together, apart = (statistics.median(times[gathers][WARMUP:]) for gathers in (True, False))
    return {
        "tokens": tokens,
        "seconds": together,
        "without_communication": apart,
        "exposed": 1 - apart / together,
        "all_seconds": {"with": times[True], "without": times[False]},
    }


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    exit_with(main)
