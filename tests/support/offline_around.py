"""Compiles the kernels around the scan for a GPU that is not there and says what they take; run as a program.

    python -m tests.support.offline_around cuda 90 32 < cases.json      (or: hip gfx942 64)

A case is an object: `label`, `operation` (conv1d or gated_norm), `spec`, the fields of its spec, and for conv1d perhaps
`packed`. The operators are called as on a GPU, with slices of a projection that have no memory, 8 x 2048 tokens. Prints
one JSON line per kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune import compiling
from llmtrain.kernels.conv1d import triton as conv1d
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm import triton as gated_norm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform

BATCH, SEQ_LEN = 8, 2048


def main(kind: str, arch: str, warp_size: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    stand_in: Any = compiling.StandIn(GPUTarget(kind, int(arch) if kind == "cuda" else arch, int(warp_size)))
    driver.set_active(stand_in)
    where = Platform("amd" if kind == "hip" else "nvidia", f"sm{arch}" if kind == "cuda" else arch, "", 1 << 36, 132)
    launch = JITFunction.run
    labels: list[str] = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled: Any = launch(self, *args, grid=grid, warmup=True, **options)
        taken = compiling._nvidia(compiled, where.arch) if kind == "cuda" else compiling._amd(compiled.asm["amdgcn"])
        wide = sum(compiled.asm["ptx"].count(f"{way}.global.v4.b32") for way in ("ld", "st")) if kind == "cuda" else 0
        shared = compiled.metadata.shared
        print(json.dumps({"case": labels[-1], "kernel": self.fn.__name__, "shared": shared, "wide": wide, **taken}))
        sys.stdout.flush()
        return compiled

    JITFunction.run = compile_only
    for case in json.load(sys.stdin):
        labels.append(case["label"])
        {"conv1d": convolve, "gated_norm": normalise}[case["operation"]](case, where)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def sliced(width: int, dtype: torch.dtype) -> Tensor:
    """Of a projection whose rows begin at multiples of 16 bytes."""
    return empty(BATCH, SEQ_LEN, width + 5120 + 128, dtype=dtype)[..., 5120:-128]


def convolve(case: dict[str, Any], where: Platform) -> None:
    spec = Conv1dSpec(**case["spec"])
    dtype = getattr(torch, spec.dtype)
    options = conv1d.build(spec, where, "").options
    x, weight = sliced(spec.channels, dtype), empty(spec.channels, spec.width, dtype=dtype)
    bias = empty(spec.channels, dtype=dtype)
    ids = empty(BATCH, SEQ_LEN, dtype=torch.int32) if case.get("packed") else None
    run(conv1d.conv1d_forward, x, weight, bias, ids, options)
    run(conv1d.conv1d_backward, empty(*x.shape, dtype=dtype), x, weight, bias, ids, options)


def normalise(case: dict[str, Any], where: Platform) -> None:
    spec = GatedNormSpec(**case["spec"])
    dtype = getattr(torch, spec.dtype)
    options = gated_norm.build(spec, where, "").options
    x, z, weight = empty(BATCH, SEQ_LEN, spec.dim, dtype=dtype), sliced(spec.dim, dtype), empty(spec.dim, dtype=dtype)
    r = empty(BATCH * SEQ_LEN, spec.n_groups, dtype=torch.float32)
    run(gated_norm.gated_norm_forward, x, z, weight, spec.n_groups, spec.eps, spec.norm_before_gate, options)
    run(gated_norm.gated_norm_backward, x, x, z, weight, r, spec.norm_before_gate, options)


def run(operator: Any, *arguments: Any) -> None:
    """Its launches: on meta tensors the dispatcher would ask its fake."""
    operator._init_fn(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
