"""The gradients of a whole model in bf16, by one set of kernels and by another, beside those of plain PyTorch in fp32.

    python -m benchmarks gradients FILE [a.b=c …] [--kernels ours public] [--exact reference] [--context 2]

The sets of kernels are those of `benchmarks steps`, --exact is the one that runs in fp32. All compute the loss of one
batch of random tokens with the weights of the config's first step, rounded to bf16. The error of a kind of parameter, say the
in_proj of all layers together: |found - exact| / |exact|. context: the same once more by so many ranks that share each
sequence, with a GPU each, in fp32 and in bf16.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.ranks import Training, on_ranks
from benchmarks.programs.training.steps import KERNELS, with_kernels
from llmtrain.distributed.world import world_from_environment
from llmtrain.errors import RunError
from llmtrain.schema.config import Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmtrain.models.hybrid import HybridLM

    Shared = dict[str, tuple[float, dict[str, Tensor]]]

LABEL = 45  # columns


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=["ours", "public"])
    parser.add_argument("--exact", choices=list(KERNELS), default="reference")
    parser.add_argument("--context", type=positive, metavar="RANKS", help="also by ranks that share sequences")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)  # one of them, which saves there what they find
    args = parser.parse(argv)
    if args.rank:
        save_shared(args)
        return 0
    configs = {name: with_kernels(args.file, args.overrides, name) for name in (args.exact, *args.kernels)}
    for config in configs.values():
        _without_weights(config)  # refuses kernels that cannot run here before anything is computed
    with ThreadPoolExecutor(1) as pool:  # they start while this process computes
        shared = pool.submit(by_ranks, args) if args.context else None
        return compare(args, configs, shared)


def compare(args: argparse.Namespace, configs: dict[str, Config], shared: Future[Shared] | None) -> int:
    import torch

    right, exact = gradients(configs[args.exact], torch.float32)
    print(f"{args.exact} in fp32: loss {right:.4f}", flush=True)
    found = {}
    for name in args.kernels:
        loss, gradient = gradients(configs[name], torch.bfloat16)
        print(f"{name} in bf16: loss {loss:.4f}", flush=True)
        found[name] = {"loss": abs(loss - right) / right, **errors(gradient, exact)}
        del gradient
    if shared:
        for name, (loss, gradient) in shared.result().items():
            print(f"{name}, by {args.context} ranks: loss {loss:.4f}", flush=True)
            gradient = {key: value.to(exact[key].device) for key, value in gradient.items()}
            found[f"{name}, shared"] = {"loss": abs(loss - right) / right, **errors(gradient, exact)}
    print(f"\n{'relative error of':{LABEL}}" + "".join(f"  {name:>9}" for name in found))
    for kind in next(iter(found.values())):
        print(
            f"{kind:{LABEL}}" + "".join(f"  {errors_[kind]:{max(len(name), 9)}.2e}" for name, errors_ in found.items())
        )
    return 0


def gradients(config: Config, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """The loss of one batch, and the gradient of every parameter in fp32, summed over microbatches."""
    import torch

    from llmtrain.models.causal_lm import CausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _without_weights(config).to_empty(device=device)
    model.init_weights(config.seed)
    model.cast(torch.bfloat16).cast(dtype)
    causal_lm = CausalLM(model, config.train.loss)
    total, found = 0.0, {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters()}
    parts = microbatches(config)
    for ids, labels in parts:
        loss = causal_lm.loss(ids.to(device), labels.to(device)).loss / len(parts)
        loss.backward()
        total += float(loss.detach())
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[name] += p.grad
        model.zero_grad(set_to_none=True)
    return total, found


def microbatches(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and their labels, [microbatch, T]; all of equal size, with equally many labels."""
    import torch

    size, per_step = config.train.microbatch_size, config.train.global_batch_size
    assert isinstance(size, int), "name a number for train.microbatch_size"
    assert per_step % size == 0, f"train.global_batch_size {per_step} is no multiple of train.microbatch_size {size}"
    g = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(config.model.vocab_size, (per_step, config.data.seq_len), generator=g)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return list(zip(ids.split(size), labels.split(size), strict=True))


def by_ranks(args: argparse.Namespace) -> Shared:
    """Losses and gradients of ranks that share sequences, by the name of a column. Raises RunError where a rank fails."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gradients.pt"
        kernels = ["--exact", args.exact, "--kernels", *args.kernels, "--context", str(args.context)]
        done = on_ranks(args.context, "gradients", str(file), args.file, *args.overrides, *kernels)
        if "failed" in done:
            raise RunError(f"ranks that share sequences: {done['failed']}")
        return torch.load(file)


def save_shared(args: argparse.Namespace) -> None:
    """Every rank calls this; the first one saves what `by_ranks` returns."""
    import torch

    found = {}
    computed = [(args.exact, "fp32"), *((name, "bf16") for name in args.kernels)]
    for name, precision in computed:
        shared = [f"train.parallel.context={args.context}", "train.sharding.strategy=full", "train.compile=off"]
        precise = "fp32" if precision == "fp32" else "amp_bf16"
        config = with_kernels(args.file, [*args.overrides, *shared, f"train.precision={precise}"], name)
        found[f"{name} in {precision}"] = shared_gradients(config)
    if world_from_environment().is_main:
        torch.save(found, args.rank)
        print(json.dumps({"saved": str(args.rank)}))


def shared_gradients(config: Config) -> tuple[float, dict[str, Tensor]]:
    """`gradients` by ranks that share sequences, in fp32 on the CPU. Every rank calls this."""
    import torch
    import torch.distributed as dist

    from llmtrain.models.init import clean_name
    from llmtrain.models.parameters import parameter_info

    made = Training(config)
    kept = {id(p) for p, info in parameter_info(made.model).items() if info.fp32}
    with torch.no_grad():
        for p in made.model.parameters():
            if id(p) not in kept:
                p.copy_(p.bfloat16())
    total, parts = torch.zeros((), device=made.device), microbatches(config)
    for ids, labels in parts:
        out = made.loss(made.own(ids, labels))
        share = out.loss * (out.n_tokens / (len(parts) * int((labels != -100).sum())))
        (share * made.world.size).backward()  # FSDP2 averages the ranks' gradients
        total += share.detach()
    dist.all_reduce(total)
    whole: dict[str, Tensor] = {}
    for name, p in made.model.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        whole[clean_name(name)] = gradient.full_tensor().float().cpu()  # pyright: ignore[reportAttributeAccessIssue]
    return float(total), whole


def _without_weights(config: Config) -> HybridLM:
    import torch

    from llmtrain.models.hybrid import HybridLM

    with torch.device("meta"):
        return HybridLM(config.model)


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative error of all parameters together, and of each kind: parameters whose names differ only in a number."""
    import torch

    wrong: dict[str, float] = defaultdict(float)
    whole: dict[str, float] = defaultdict(float)
    for name, right in exact.items():
        for kind in ("all", re.sub(r"\.\d+\.", ".*.", name)):
            wrong[kind] += float((found[name] - right).norm(dtype=torch.float64)) ** 2
            whole[kind] += float(right.norm(dtype=torch.float64)) ** 2
    return {kind: (wrong[kind] / whole[kind]) ** 0.5 for kind in wrong}
