"""Cost of Composer, FSDP2 and the loader: `llmtrain train` beside a plain PyTorch loop over the same model.

    python -m benchmarks overhead FILE [a.b=c …]

Both run on one GPU, one after the other and the plain loop once more, each in a process of its own, on the same
model, kernels, compiled blocks, loss, optimizer, batch and clipping. The plain loop computes on a bf16 copy of fp32
weights, sums gradients in fp32, and feeds random tokens made beforehand: no loader, no trainer, no sharding, no logging.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.arguments import Parser
from benchmarks.harness.ranks import in_process
from benchmarks.harness.report import Report
from llmtrain.errors import RunError
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

WARMUP = 3


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True, out=True)
    parser.add_argument("--in-process", action="store_true", help="only the plain loop, in this process, as JSON")
    args = parser.parse(argv)
    config = load_config(args.file, args.overrides)
    if args.in_process:
        print(json.dumps({"seconds": plain_loop(config).seconds}))
        return 0
    report, found = Report(args.out), {}
    for what, measure in (("plain loop", _plain), ("llmtrain train", _llmtrain), ("plain loop again", _plain)):
        found[what] = seconds = measure(args, config)
        plain = min(value for name, value in found.items() if "plain" in name)
        rate = config.tokens_per_step / seconds
        figures = {"step_ms": 1e3 * seconds, "tokens_per_s": rate, "mfu_percent": 100 * mfu(config, rate)}
        report.add(what, **figures, plain_x=seconds / plain if measure is _llmtrain else None)
    return 0


def _plain(args: argparse.Namespace, _: Config) -> float:
    found = in_process("overhead", args.file, *args.overrides)
    if "failed" in found:
        raise RunError(f"the plain loop: {found['failed']}")
    return statistics.median(found["seconds"])


def _llmtrain(args: argparse.Namespace, config: Config) -> float:
    from llmtrain.train.report.loggers import read_metrics

    command = [sys.executable, "-m", "llmtrain.cli", "train", "--nproc", "1", "--fresh", args.file, *args.overrides]
    subprocess.run(command, check=True)
    _, seconds = read_metrics(Path(config.run_dir) / "metrics.jsonl", "throughput/step_seconds")
    return statistics.median(seconds[WARMUP - 1 :])  # the first step is never logged


@dataclass
class Loop:
    """Steps of the plain loop. seconds: of every step after the warmup by the host's clock, from an idle device to an idle device;
    host: of it, until the host has launched everything. kernels: seconds of the GPU's kernels in one step, None without a GPU.
    losses: of all steps.
    """

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    kernels: float | None = None
    losses: list[float] = field(default_factory=list)


def plain_loop(config: Config, fullgraph: bool = True) -> Loop:
    """Train for the config's steps. fullgraph: compile layers without graph breaks."""
    import torch

    from llmtrain.distributed.world import World
    from llmtrain.models.causal_lm import CausalLM
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.objectives.base import build_objective, compute_loss
    from llmtrain.schema.schedule import resolve
    from llmtrain.train.graphs.cuda_graphs import graphed_loss
    from llmtrain.train.optim import build_optimizer
    from llmtrain.train.parallel import compile_layers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(config.seed)
    with torch.device("meta"):
        model, weights = (HybridLM(config.model) for _ in range(2))
    weights.to_empty(device=device)
    weights.init_weights(config.seed)
    model.to_empty(device=device)
    if config.train.compile != "off":
        compile_layers(model, fullgraph)
    if config.train.precision == "amp_bf16":
        model.cast(torch.bfloat16)
    causal_lm = CausalLM(model, config.train.loss)
    objective = build_objective(config.objective)
    graphs = graphed_loss(config, causal_lm, objective, World(0, 1, 0, 1))
    copies = [p.data for p in model.parameters()]
    masters: list[torch.Tensor] = list(weights.parameters())
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = build_optimizer(weights, config.optimizer)
    rate = resolve(config)
    assert isinstance(config.train.microbatch_size, int), "name a number for train.microbatch_size"
    size, per_step = config.train.microbatch_size, config.train.global_batch_size
    ids = torch.randint(config.model.vocab_size, (per_step, config.data.seq_len), device=device)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100

    def train_step(number: int) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
            torch._foreach_zero_(gradients)
        total = torch.zeros((), device=device)
        for at in range(0, per_step, size):
            batch = {"input_ids": ids[at : at + size], "labels": labels[at : at + size]}
            loss = (graphs(batch) if graphs else compute_loss(causal_lm, objective, batch)).loss
            (loss * size / per_step).backward()
            total += loss.detach() * size / per_step
            del loss  # with its autograd graph, before the next
            reached = [
                (sum_, p.grad) for sum_, p in zip(gradients, model.parameters(), strict=True) if p.grad is not None
            ]
            torch._foreach_add_(*(list(tensors) for tensors in zip(*reached, strict=True)))
            model.zero_grad(set_to_none=True)
        torch.nn.utils.clip_grad_norm_(masters, config.train.clip_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.step()
        return total

    loop, steps = Loop(), int(config.train.duration.value)
    for number in range(steps):
        synchronize()
        began = time.perf_counter()
        total = train_step(number)
        launched = time.perf_counter()
        synchronize()
        if number >= WARMUP:
            loop.seconds.append(time.perf_counter() - began)
            loop.host.append(launched - began)
        loop.losses.append(float(total))
    if device == "cuda":
        loop.kernels = kernel_seconds(lambda: train_step(steps - 1))
    return loop


def kernel_seconds(run: Callable[[], object]) -> float:
    """Seconds of the GPU's kernels within run(), as its profiler counts them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in events if not e.is_user_annotation) / 1e6


def mfu(config: Config, tokens_per_second: float) -> float:
    import torch

    from llmtrain.models.hybrid import HybridLM
    from llmtrain.train.callbacks.throughput import token_cost

    with torch.device("meta"):
        model = HybridLM(config.model)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cost = token_cost(model, config.train, config.data.seq_len, device)
    return tokens_per_second * cost.foundry / cost.peak.flops if cost.peak.flops else float("nan")
