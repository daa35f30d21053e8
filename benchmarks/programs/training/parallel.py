"""Training steps of one model on several GPUs, by meshes of context and tensor parallelism, and the scan's communication alone.

    python -m benchmarks parallel FILE [a.b=c …] --nproc 2 [--steps 4] [--lengths 16384 32768] [--out FILE.json]
    python -m benchmarks parallel --scan --nproc 2 [--out FILE.json]

FILE is trained on random tokens as train.parallel, train.sharding and the rest say, by the model, the sharding and the clipping of
`llmtrain train`, without trainer and loader. A row has the tokens/s per GPU, MFU by causal FLOPs, the memory at the peak, the
kernels that attention took, and the seconds from the start on at which the model was ready and at which each step ended.
lengths: steps over sequences of each of them, one after the other; from the first two also the longest that should fit, since the
memory at the peak grows by as much with every token. scan: a Mamba-2 scan over 131,072 tokens that the ranks share, forward and
backward, with its all-gather and with the same bytes copied on the rank itself, in turn: the difference is exposed
communication. Ranks are processes of this machine; without GPUs they run on the CPU, which is good for a try.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Parser, natural, positive
from benchmarks.harness.ranks import Training, on_ranks
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

SCANS = 8  # one behind the other, as the layers of a step
START = time.perf_counter()


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("file", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--nproc", type=positive, default=1)
    parser.add_argument("--steps", type=natural, default=4, help="timed ones")
    parser.add_argument("--warmup", type=natural, default=2, help="steps before")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[])
    parser.add_argument(
        "--kernels", action="store_true", help="also: what one more step's milliseconds went into, on rank 0"
    )
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--tokens", type=positive, default=131_072, help="with --scan")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--rows", type=Path, metavar="FILE.jsonl", help="appended to after each length")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse(argv)
    if (args.file is None) != args.scan:
        parser.error("give a FILE, or --scan")
    if args.rank:
        rows = (
            scan(args.tokens, args.warmup, args.steps)
            if args.scan
            else steps(load(args), args.lengths, args.warmup, args.steps, args.kernels, args.rows)
        )
        if world_from_environment().is_main:
            print(json.dumps(rows), flush=True)
        return 0
    what = ["--scan", "--tokens", str(args.tokens)] if args.scan else [args.file, *args.overrides]
    if args.kernels:
        what.append("--kernels")
    if args.lengths:
        what += ["--lengths", *map(str, args.lengths)]
    if args.rows:
        what += ["--rows", str(args.rows)]
    log = args.out and args.out.with_suffix(".txt")
    counts = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    found = on_ranks(args.nproc, "parallel", *counts, *what, log=log)
    found = {"file": args.file, "overrides": args.overrides, "nproc": args.nproc, **found}
    print(json.dumps(found), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))
    return int("failed" in found)


def load(args: argparse.Namespace) -> Config:
    longest = max(args.lengths, default=0)
    fitted = [f"data.seq_len={longest}", f"model.max_seq_len={longest}"] if longest else []
    return load_config(args.file, [*args.overrides, *fitted])


def steps(
    config: Config, lengths: list[int], warmup: int, count: int, kernels: bool = False, keep: Path | None = None
) -> dict[str, Any]:
    """Steps of one microbatch per group, over sequences of each length (none: of the config's), every rank calling this.

    keep: file of JSON lines that gets each row as soon as there is one."""
    import torch

    made = Training(config)
    rows = []
    for length in lengths or [config.data.seq_len]:
        rows.append(steps_of(made, config, length, warmup, count, kernels))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if keep and made.world.is_main:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"gpus": made.world.size, **rows[-1]}) + "\n")
    found: dict[str, Any] = {"rows": rows}
    if len(rows) > 1 and made.device.type == "cuda":
        (n, m), (n2, m2) = ((row["seq_len"], row["memory"]) for row in rows[:2])
        found["bytes_per_token"] = (m2 - m) / (n2 - n)
        found["device_memory"] = torch.cuda.mem_get_info()[1]
        found["longest_estimated"] = n + (found["device_memory"] - m) / found["bytes_per_token"]
    return found


def steps_of(
    made: Training, config: Config, length: int, warmup: int, count: int, kernels: bool = False
) -> dict[str, Any]:
    import torch

    from llmtrain.models.hybrid import HybridLM
    from llmtrain.plan.describe import parameter_sizes
    from llmtrain.plan.memory import estimate_memory
    from llmtrain.train.callbacks.throughput import token_cost

    sizes = parameter_sizes(config)
    of_length = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": length})})
    with torch.device("meta"):
        cost = token_cost(HybridLM(config.model), config.train, length, made.device)
    size = config.train.microbatch_size if isinstance(config.train.microbatch_size, int) else 1
    torch.manual_seed(made.world.data_rank)
    ids = torch.randint(config.model.vocab_size, (size, length))
    part = made.own(ids, ids.roll(-1, 1))
    synchronize(made.device)
    if made.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, losses, ends = [], [], [time.perf_counter() - START]
    for step in range(warmup + count):
        synchronize(made.device)
        began = time.perf_counter()
        loss = made.step(part)
        synchronize(made.device)
        losses.append(float(loss))
        ends.append(time.perf_counter() - START)
        print(f"step {step + 1} of {warmup + count} ended after {ends[-1]:.1f} s", file=sys.stderr, flush=True)
        if step == 0 and made.device.type == "cuda":  # before the optimizer had its state
            torch.cuda.reset_peak_memory_stats()
        if step >= warmup or not count:
            seconds.append(time.perf_counter() - began)
    step_seconds = statistics.median(seconds)
    per_gpu = ids.numel() * made.world.data_size / made.world.size / step_seconds
    found = {"kernels": kernels_of(lambda: made.step(part))} if kernels else {}
    return found | {
        "device": torch.cuda.get_device_name() if made.device.type == "cuda" else "CPU",
        "seq_len": length,
        "step_seconds": step_seconds,
        "tokens_per_second_per_gpu": per_gpu,
        "mfu_causal": per_gpu * cost.causal / cost.peak.flops if cost.peak.flops else None,
        "memory": torch.cuda.max_memory_allocated() if made.device.type == "cuda" else None,
        "memory_estimated": estimate_memory(of_length, sizes, made.world.size).total,
        "reserved": torch.cuda.max_memory_reserved() if made.device.type == "cuda" else None,
        "attention": sorted(attention_backends(made.model)),
        "losses": losses,
        "seconds": seconds,
        "ready_and_steps_ended_after": ends,
    }


def kernels_of(step: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds and launches of each kernel of a step, the longest 40. Streams run beside each other, so the sum may be more."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        step()
        if gpu:
            torch.cuda.synchronize()
    times = {
        event.key: [(event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3, event.count]
        for event in found.key_averages()
    }
    return dict(sorted(times.items(), key=lambda item: -item[1][0])[:40])


def attention_backends(model: Any) -> set[str]:
    """The kernels of attention that take part in a step."""
    from llmtrain.models.mixers.attention import Attention

    found = (module for module in model.modules() if isinstance(module, Attention))
    return {(one.segment_backend or one.backend).name for one in found}


def scan(tokens: int, warmup: int, count: int) -> dict[str, Any]:
    """Seconds of a scan of Zamba2-2.7B's shape that all ranks share, with and without communication. Every rank calls this."""
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from llmtrain.kernels import registry
    from llmtrain.kernels.platform import detect
    from llmtrain.kernels.ssd.spec import SSDSpec
    from llmtrain.models.mixers.mamba2_segments import SegmentScan
    from llmtrain.models.segments import ContextParallelRanks

    device = initialize()
    world, group = world_from_environment(), dist.group.WORLD
    assert group is not None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = SSDSpec(80, 64, 64, 1, 256, None, str(dtype).removeprefix("torch."))
    kernel = registry.resolve("ssd", "auto", spec, detect()).build(spec, detect())
    segments = ContextParallelRanks(world.rank, world.size, group.group_name)
    context = SegmentScan.of(segments, tokens, device, None, 4)
    n = tokens // world.size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    x, dt, B, C = draw(1, n, 80, 64), draw(1, n, 80), draw(1, n, 1, 64), draw(1, n, 1, 64)
    A, D, dt_bias = (-torch.rand(80, device=device), *(torch.rand(80, device=device) for _ in "Db"))

    ones = torch.ones_like(x)

    def layer(x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
        return context.apply(kernel, x, dt, A, B, C, D, dt_bias)

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
    for turn in range(2 * (warmup + 3 * count)):
        with patch(alone, copied) if turn % 2 else nullcontext():
            times[turn % 2 == 0].append(run())
    together, apart = (statistics.median(times[gathers][warmup:]) for gathers in (True, False))
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
