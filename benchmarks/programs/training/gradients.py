"""The gradients of a whole model in bf16, by one set of kernels and by another, beside those of plain PyTorch in fp32.

    python -m benchmarks gradients FILE [a.b=c …] [--kernels ours public] [--exact reference]

The sets of kernels are those of `benchmarks steps`, --exact is the one that runs in fp32. All compute the loss of one
batch of random tokens with the weights of the config's first step, rounded to bf16. The error of a kind of parameter, say the
in_proj of all layers together: |found - exact| / |exact|.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.harness.arguments import Parser
from benchmarks.programs.training.steps import KERNELS, with_kernels
from llmtrain.schema.config import Config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmtrain.models.hybrid import HybridLM

LABEL = 45  # columns


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, config=True)
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=["ours", "public"])
    parser.add_argument("--exact", choices=list(KERNELS), default="reference")
    args = parser.parse(argv)
    configs = {name: with_kernels(args.file, args.overrides, name) for name in (args.exact, *args.kernels)}
    for config in configs.values():
        _without_weights(config)  # refuses kernels that cannot run here before anything is computed
    return compare(args, configs)


def compare(args: argparse.Namespace, configs: dict[str, Config]) -> int:
    import torch

    right, exact = gradients(configs[args.exact], torch.float32)
    print(f"{args.exact} in fp32: loss {right:.4f}", flush=True)
    found = {}
    for name in args.kernels:
        loss, gradient = gradients(configs[name], torch.bfloat16)
        print(f"{name} in bf16: loss {loss:.4f}", flush=True)
        found[name] = {"loss": abs(loss - right) / right, **errors(gradient, exact)}
        del gradient
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
