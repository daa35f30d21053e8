"""Training steps of one model on several GPUs, by meshes of train.parallel, and the scan's communication alone.

    python -m benchmarks parallel FILE [a.b=c …] --nproc 2 [--steps 4] [--lengths 16384 32768] [--out FILE.json]
    python -m benchmarks parallel FILE train.parallel.pipeline=2 --nproc 2 --microbatches 8 16 32 [--out FILE.json]
    python -m benchmarks parallel FILE --nproc 2 --each 'alone:' --each 'divided: train.parallel.expert=2' [--out FILE.json]
    python -m benchmarks parallel --scan --nproc 2 [--out FILE.json]

FILE is trained on random tokens as train.parallel, train.sharding and the rest say, by the model, the sharding and the clipping of
`llmtrain train`, without trainer and loader. A row has the tokens/s per GPU, MFU by causal FLOPs, the memory at the peak and the
kernels that attention took. lengths: steps over sequences of each of them, one after the other, without CUDA graphs. microbatches:
steps of so many of them over all GPUs, by graphs where a run would make them, with the memory of every rank, and of a pipeline the
medians of each part's passes, what happens once a batch, and the bubble: the share of the batch's other time in which a rank, on
average, runs no pass, beside what plan/scaling.py predicts.
each: the same with further settings, one after the other in the same processes, with rows by these names.
scan: a Mamba-2 scan over 131,072 tokens that the ranks share, forward and backward, with its all-gather and with the same bytes
copied on the rank itself, in turn: the difference is exposed communication. Ranks are processes of this machine; without GPUs they
run on the CPU, for a try.
"""

import argparse
import gc
import importlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.harness.arguments import Parser, natural, positive
from benchmarks.harness.ranks import Training, on_ranks
from benchmarks.harness.report import Report
from llmtrain.distributed.world import initialize, world_from_environment
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

SCANS = 8  # one behind the other, as the layers of a step


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, out=True)
    parser.add_argument("file", nargs="?", metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--nproc", type=positive, default=1)
    parser.add_argument("--steps", type=natural, default=4, help="timed ones")
    parser.add_argument("--warmup", type=natural, default=2, help="steps before")
    parser.add_argument("--lengths", type=positive, nargs="+", default=[])
    parser.add_argument("--microbatches", type=positive, nargs="+", default=[])
    parser.add_argument("--each", action="append", default=[], metavar="'NAME: a.b=c …'")
    parser.add_argument("--kernels", action="store_true", help="also the milliseconds of one step's kernels, on rank 0")
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--tokens", type=positive, default=131_072, help="with --scan")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # in this process
    parser.config = True
    given = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse(given)
    if (args.file is None) != args.scan:
        parser.error("give a FILE, or --scan")
    if not args.rank:
        log = args.out and args.out.with_suffix(".txt")
        found = on_ranks(args.nproc, "parallel", *given, log=log)
        print(json.dumps(found), flush=True)
        return int("failed" in found)
    report = Report(args.out if world_from_environment().is_main else None)
    if args.scan:
        report.add("a scan that ranks share", **scan(args.tokens, args.warmup, args.steps))
    else:
        longest = max(args.lengths, default=0)
        fitted = [f"data.seq_len={longest}", f"model.max_seq_len={longest}"] if longest else []
        each = [
            (label, shlex.split(settings)) for label, _, settings in (one.partition(":") for one in args.each or [""])
        ]
        configs = [(label, load_config(args.file, [*args.overrides, *fitted, *more])) for label, more in each]
        # PyTorch keeps an error of an import that it tried, and with it the frames of who imports: of a model, that model.
        importlib.import_module("llmtrain.train.build")
        for label, config in configs:
            rows_of(config, label, args, report)
    print(json.dumps({"rows": report.rows}), flush=True)
    return 0


def rows_of(config: Config, label: str, args: argparse.Namespace, report: Report) -> None:
    """Add the rows of one configuration, `label` before their names. Every rank calls this."""
    import torch

    made, numbers = Training(config), args.microbatches or [None]
    for length in args.lengths or [config.data.seq_len]:
        found = [steps_of(made, length, args.warmup, args.steps, args.kernels, number) for number in numbers]
        for number, figures in zip(numbers, found, strict=True):
            name = f"{length:,} tokens" if number is None else f"{number} microbatches of {length:,} tokens"
            report.add(f"{label}, {name}" if label else name, **figures)
    if args.each:  # room for the next
        del made
        gc.collect()
        torch.compiler.reset()


class PassTimes:
    """Milliseconds of every pass of this rank's stage between two moments, by the GPU's clock where there is one."""

    def __init__(self) -> None:
        import torch

        from llmtrain.train.pipeline.schedule import _Stage

        self.gpu, self.times = torch.cuda.is_available(), dict[str, list[tuple[Any, Any]]]()
        self.patches = [
            patch.object(_Stage, name, self._timed(getattr(_Stage, name), kind))
            for name, kind in (("forward_one_chunk", "forward"), ("backward_one_chunk", "backward"))
        ]

    def now(self) -> Any:
        import torch

        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def of(self, run: Callable[[], object]) -> dict[str, Any]:
        """`bubble` of the passes of `run`. Every rank calls this."""
        import torch.distributed as dist

        from benchmarks.harness.models import clock

        self.times.clear()
        dist.barrier()
        clock()
        with ExitStack() as stack:
            for one in self.patches:
                stack.enter_context(one)
            began = self.now()
            run()
            ended = self.now()
        clock()
        passes = {name: [self._between(*one) for one in some] for name, some in self.times.items()}
        last = max((some[-1][1] for some in self.times.values()), key=lambda moment: self._between(began, moment))
        first = min((some[0][0] for some in self.times.values()), key=lambda moment: self._between(began, moment))
        around = self._between(began, first) + self._between(last, ended)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (passes, self._between(began, ended), around))
        return bubble(found)

    def _between(self, began: Any, ended: Any) -> float:
        return began.elapsed_time(ended) if self.gpu else 1e3 * (ended - began)

    def _timed(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(stage: Any, *args: Any, **kwargs: Any) -> Any:
            began = self.now()
            found = method(stage, *args, **kwargs)
            self.times.setdefault(f"{kind} {stage.stage_index}", []).append((began, self.now()))
            return found

        return run


def bubble(ranks: Sequence[tuple[dict[str, list[float]], float, float]]) -> dict[str, Any]:
    """Share of a batch's time in which the average rank is in no pass, without what happens once a batch; medians of each part's
    passes.

    ranks: of each the milliseconds of its passes in turn, by part, those of the whole batch, and those before its first and after
    its last pass. Once a batch FSDP2 gathers weights, in the first forward pass of a part, and sums gradients, in its last backward
    pass: what these take beyond the part's median. All stages wait for each of them, as for what the first stage does around its
    passes.
    """
    medians = [{name: statistics.median(some) for name, some in passes.items()} for passes, _, _ in ranks]
    once = [
        sum(max(some[-1 if name.startswith("backward") else 0] - median[name], 0.0) for name, some in passes.items())
        for (passes, _, _), median in zip(ranks, medians, strict=True)
    ]
    outside, work = min(around for _, _, around in ranks), [sum(map(sum, passes.values())) for passes, _, _ in ranks]
    idle = [
        1 - (busy - own) / (whole - sum(once) - outside)
        for busy, own, (_, whole, _) in zip(work, once, ranks, strict=True)
    ]
    return {
        "bubble_percent": 100 * statistics.mean(idle),
        "waits_percent": [100 * (1 - busy / whole) for busy, (_, whole, _) in zip(work, ranks, strict=True)],
        "once_ms": [*once, outside],
        "passes_ms": {name: ms for median in medians for name, ms in median.items()},
    }


def steps_of(
    made: Training, length: int, warmup: int, count: int, kernels: bool = False, microbatches: int | None = None
) -> dict[str, Any]:
    """Figures of steps of one microbatch per group, or of `microbatches` over all groups, over sequences of this length. Every rank
    calls this."""
    import torch
    import torch.distributed as dist

    from benchmarks.harness.models import clock
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.plan.memory import estimate_memory, stage_memories
    from llmtrain.plan.parameters import parameter_sizes
    from llmtrain.plan.scaling import passes_share
    from llmtrain.train.callbacks.throughput import token_cost

    config, per_group = made.config, (microbatches or made.world.data_size) // made.world.data_size
    sizes, size = parameter_sizes(config), config.train.least_microbatch
    of_length = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": length})})
    if microbatches is not None:
        batch = config.train.model_copy(update={"global_batch_size": microbatches * size})
        of_length = of_length.model_copy(update={"train": batch})
    with torch.device("meta"):
        cost = token_cost(HybridLM(config.model), config.train, length, made.device)
    torch.manual_seed(made.world.data_rank)
    ids = torch.randint(config.model.vocab_size, (size * per_group, length))
    part = made.own(ids, ids.roll(-1, 1)) if microbatches is None else {}
    gpu = made.device.type == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    graphs = made.graphs if microbatches is not None else None
    if graphs is not None:
        while graphs.graph is None and graphs.microbatches:  # they are made in the step after the first
            made.accumulate(ids)
            made.update()
    seconds, passes, losses, norms = [], [], [], []
    for step in range(warmup + count):
        began = clock()
        if microbatches is None:
            losses.append(float(made.step(part)))
        else:
            losses.append(float(made.accumulate(ids)))
            passes.append(clock() - began)
            norms.append(float(made.update()))
        took = clock() - began
        if step == 0 and gpu:  # before the optimizer had its state
            torch.cuda.reset_peak_memory_stats()
        if step >= warmup or not count:
            seconds.append(took)
    per_gpu = ids.numel() * made.world.data_size / made.world.size / statistics.median(seconds)
    peaks: list[float | None] = [None] * made.world.size
    dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() / 2**30 if gpu else None)
    of_stages = (
        {}
        if microbatches is None
        else {
            "passes_s": statistics.median(passes[warmup:] or passes),
            "peaks_gib": peaks,
            "estimated_stages_gib": [one.total / 2**30 for one in stage_memories(of_length, sizes, made.world.size)],
            "layers_of_stages": [stage.spans for stage in sizes.stages],
            "shares_of_stages": [stage.share for stage in sizes.stages],
            "sharding": config.train.sharding.model_dump(mode="json"),
            "graphs": graphs is not None and graphs.graph is not None,
        }
    )
    if of_stages and sizes.stages:
        expected = 100 * (1 - 1 / passes_share(of_length, sizes, made.world.size))
        found = []
        for _ in range(3):  # the host may falter in one
            found.append(PassTimes().of(lambda: made.accumulate(ids)))
            made.update()
        of_stages |= sorted(found, key=lambda one: one["bubble_percent"])[1] | {"bubble_expected_percent": expected}
    return of_stages | {
        "step_s": statistics.median(seconds),
        "tokens_per_s": per_gpu,
        "mfu_causal_percent": 100 * per_gpu * cost.causal / cost.peak.flops if cost.peak.flops else None,
        "peak_gib": peaks[made.world.rank],
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if gpu else None,
        "estimated_gib": estimate_memory(of_length, sizes, made.world.size).total / 2**30,
        "attention": sorted(attention_backends(made.model)),
        "losses_nats": losses,
        "gradient_norms": norms or None,
        "all_steps_s": seconds,
        "kernels_ms": kernels_of(lambda: made.accumulate(ids) if microbatches else made.step(part))
        if kernels
        else None,
    }


def kernels_of(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each kernel of a step, the longest 40. Streams run beside each other, so the sum may be more."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        step()
        if gpu:
            torch.cuda.synchronize()
    times = [
        (event.self_device_time_total if gpu else event.self_cpu_time_total, event.key)
        for event in found.key_averages()
    ]
    return {name: microseconds / 1e3 for microseconds, name in sorted(times, reverse=True)[:40]}


def attention_backends(model: Any) -> set[str]:
    """The kernels of attention that take part in a step."""
    from llmtrain.models.mixers.attention import Attention

    found = (module for module in model.modules() if isinstance(module, Attention))
    return {(one.segment_backend or one.backend).name for one in found}


def scan(tokens: int, warmup: int, count: int) -> dict[str, Any]:
    """Seconds of a scan of Zamba2-2.7B's shape that all ranks share, with and without communication. Every rank calls this."""
    import torch
    import torch.distributed as dist

    from benchmarks.harness.models import clock
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
        began = clock()
        for _ in range(SCANS):
            layer(x, dt, B, C).backward(ones)
        return (clock() - began) / SCANS

    def copied(own: torch.Tensor, dim: int, group: str) -> torch.Tensor:
        return torch.cat([own] * world.size)

    alone = "llmtrain.models.segments.all_gather_tensor_autograd"
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (warmup + 3 * count)):
        with patch(alone, copied) if turn % 2 else nullcontext():
            times[turn % 2 == 0].append(run())
    together, apart = (statistics.median(times[gathers][warmup:]) for gathers in (True, False))
    return {
        "ms": 1e3 * together,
        "without_communication_ms": 1e3 * apart,
        "exposed_percent": 100 * (1 - apart / together),
    }
