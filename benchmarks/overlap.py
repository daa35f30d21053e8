"""Steps over several GPUs with the reductions of a microbatch beside the next one's forward pass, and without, in turn.

    python -m benchmarks.overlap FILE [a.b=c …] --nproc 2 [--steps 6] [--kernels] --out FILE.json

FILE is trained on random tokens by the model, the sharding, the marks of microbatches and the clipping of `llmtrain train`,
without trainer and loader. In steps of the second kind, a microbatch waits for its last reductions. The result has medians of both
kinds, after --warmup steps of each, and the memory at the peak; kernels: also what one more step of each went into, on rank 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.arguments import parse
from benchmarks.parallel import kernels_of, synchronize
from benchmarks.ranks import Training, on_ranks
from llmtrain.distributed.world import world_from_environment
from llmtrain.errors import exit_with
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

KINDS = ("overlapped", "waiting")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed ones of each kind")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each kind before")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parse(parser)
    if args.rank:
        found = compare(load_config(args.file, args.overrides), args.warmup, args.steps, args.kernels, args.out)
        if world_from_environment().is_main:
            print(json.dumps(found), flush=True)
        return 0
    what = [
        args.file,
        *args.overrides,
        "--steps",
        str(args.steps),
        "--warmup",
        str(args.warmup),
        "--out",
        str(args.out),
    ]
    found = on_ranks(
        args.nproc,
        "benchmarks.overlap",
        *what,
        *(["--kernels"] if args.kernels else []),
        log=args.out.with_suffix(".txt"),
    )
    print(json.dumps(found), flush=True)
    args.out.write_text(json.dumps({"file": args.file, "overrides": args.overrides, "nproc": args.nproc, **found}))
    return int("failed" in found)


class Steps:
    """Steps of a model over several ranks, of either kind. Every rank makes one and calls `step`, in the same order."""

    def __init__(self, config: Config):
        import torch

        from llmtrain.plan.automatic import resolve_auto
        from llmtrain.plan.describe import parameter_sizes
        from llmtrain.train.step import GradientSync

        world = world_from_environment()
        memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
        sizes = parameter_sizes(config)
        config = resolve_auto(config, sizes, world.size, world.local_size, memory).config
        self.config, self.made = config, Training(config)
        self.sync = GradientSync(self.made.causal_lm, config.train.sharding)
        size = config.train.least_microbatch
        self.count = config.train.global_batch_size // (size * self.made.world.data_size)
        torch.manual_seed(self.made.world.data_rank)
        ids = torch.randint(config.model.vocab_size, (self.count, size, config.data.seq_len))
        self.parts = [self.made.own(one, one.roll(-1, 1)) for one in ids]

    def step(self, kind: str) -> float:
        """The loss of the first microbatch."""
        losses = []
        for number, part in enumerate(self.parts, 1):
            self.sync.mark(number == len(self.parts))
            if kind == KINDS[1]:
                self.made.causal_lm.set_is_last_backward(True)  # type: ignore[operator]
            loss = self.made.loss(part).loss
            (loss / self.count).backward()
            losses.append(loss.detach())
        self.made.update()
        return float(losses[0])


def compare(config: Config, warmup: int, count: int, kernels: bool, out: Path) -> dict[str, Any]:
    import torch

    steps = Steps(config)
    device = steps.made.device
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks, losses = {}, []
    for turn in range(warmup + count):
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            torch.distributed.barrier()
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            losses.append(steps.step(kind))
            synchronize(device)
            seconds[kind].append(time.perf_counter() - began)
            peaks[kind] = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            print(f"{kind}: {seconds[kind][-1]:.4f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    tokens = config.tokens_per_step / world_from_environment().size
    medians = {kind: statistics.median(of[warmup:]) for kind, of in seconds.items()}
    found = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "sharding": steps.config.train.sharding.model_dump(mode="json"),
        "tokens_per_second_per_gpu": {kind: tokens / one for kind, one in medians.items()},
        "overlapped_over_waiting": medians[KINDS[1]] / medians[KINDS[0]],
        "seconds": seconds,
        "peak_gib": peaks,
        "losses": losses,
    }
    if world_from_environment().is_main:
        out.write_text(json.dumps(found))
    if kernels:
        found["kernels"] = {kind: kernels_of(lambda kind=kind: steps.step(kind)) for kind in KINDS}
    return found


if __name__ == "__main__":
    exit_with(main)
