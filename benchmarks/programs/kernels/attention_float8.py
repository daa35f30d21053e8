"""Attention in float8 beside ours in bf16 and cuDNN: times of forward and backward, and errors against float64, on a GPU.

    python -m benchmarks attention_float8 [--lengths T …] [--head-dims D …] --out FILE.json

16,384 tokens and 2,048 channels, causal. Errors are those of two heads of normal numbers, and with FlashAttention-3's outliers
(arXiv:2407.08608, section 4.3): one number of a thousand of queries, keys and values has a further one, ten times as large.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.report import Report
from llmtrain.kernels import platform as platforms
from llmtrain.kernels import registry
from llmtrain.kernels.attention.operation import OPERATION
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operation import Shape, leaves, relative_error

BACKENDS = ("triton", "triton_float8", "sdpa:cudnn")
NAMES = ("out", "dq", "dk", "dv")
OUTLIERS, OUTLIER = 0.001, 10.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__)
    parser.add_argument("--lengths", nargs="+", type=positive, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--head-dims", nargs="+", type=positive, default=[64, 128])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse(argv)
    report = Report(args.out)
    for head_dim in args.head_dims:
        for seq_len in args.lengths:
            report.add(**times(OPERATION.sized(head_dim, seq_len)))
        for outliers in (False, True):
            for backend in BACKENDS[:2]:
                report.add(**errors(backend, head_dim, max(args.lengths), outliers))
    return 0


def times(shape: Shape) -> dict[str, Any]:
    """Milliseconds of each backend, and how many times as fast as ours in bf16 float8 is."""
    given, up = OPERATION.draw(shape, "cuda")
    row: dict[str, Any] = {"what": f"{OPERATION.label(shape)} T {shape.seq_len}"}
    for name in BACKENDS:
        tensors, run = leaves(given), function(name, shape)
        out = run(*tensors)
        key = name.partition(":")[2] or name
        row[f"{key}_forward_ms"] = median_ms(lambda run=run, tensors=tensors: run(*tensors))
        row[f"{key}_backward_ms"] = median_ms(
            lambda out=out, tensors=tensors: torch.autograd.grad(out, tensors, up, retain_graph=True)
        )
    forward, backward = ([row[f"{name}_{way}_ms"] for name in BACKENDS[:2]] for way in ("forward", "backward"))
    row["forward_times"], row["backward_times"] = forward[0] / forward[1], backward[0] / backward[1]
    return row | {"both_times": (forward[0] + backward[0]) / (forward[1] + backward[1])}


def function(backend: str, shape: Shape) -> Callable[..., Any]:
    here = platforms.detect()
    kernel = registry.resolve("attention", backend, shape.spec, here).build(shape.spec, here)
    return OPERATION.bind(kernel, shape, "cuda")


def median_ms(call: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))  # type: ignore[arg-type]


def errors(backend: str, head_dim: int, seq_len: int, outliers: bool) -> dict[str, Any]:
    """Relative errors in the norm of whole tensors, and the root mean square of the output's."""
    spec = AttentionSpec(2, 2, head_dim, head_dim**-0.5)
    shape = Shape(spec, 1, seq_len, "plain")
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(with_outliers: bool) -> Tensor:
        size = (1, seq_len, 2, head_dim)
        x, more = (torch.randn(size, device="cuda", generator=generator) for _ in range(2))
        where = torch.rand(size, device="cuda", generator=generator) < (OUTLIERS if with_outliers else 0)
        return (x + OUTLIER * more * where).bfloat16()

    given, up = [drawn(outliers) for _ in range(3)], drawn(False)
    tensors = leaves(given)
    out = function(backend, shape)(*tensors)
    found = OPERATION.pieces(shape, [out.detach(), *torch.autograd.grad(out, tensors, up)])
    exact = OPERATION.exact(shape, given, up)
    row = {f"{name}_error": relative_error(a, b) for name, a, b in zip(NAMES, found, exact, strict=True)}
    rmse = float((found[0].double() - exact[0]).square().mean().sqrt())
    numbers = "with outliers" if outliers else "normal numbers"
    return {"what": f"{backend}, head_dim {head_dim}, T {seq_len}, {numbers}", **row, "out_rmse_error": rmse}
