"""Compiles the kernels around the scan for a GPU that is not there and says what they take; run as a program.

    python -m tests.support.offline_around sm90 < cases.json

A case is an object: `label`, `operation` (conv1d, gated_norm or rotary), `spec`, the fields of its spec, and for conv1d
perhaps `packed`. The operators are called as on a GPU, with slices of a projection that have no memory, 8 x 2048 tokens. Prints
one JSON line per kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.compiling import compile_only, platform_of
from llmtrain.kernels.conv1d import triton as conv1d
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm import triton as gated_norm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary import triton as rotary

BATCH, SEQ_LEN = 8, 2048


def main(arch: str) -> None:
    where = platform_of(arch)
    with compile_only(arch) as taken:
        for case in json.load(sys.stdin):
            {"conv1d": convolve, "gated_norm": normalise, "rotary": turn}[case["operation"]](case, where)
            for found in taken:
                print(json.dumps({"case": case["label"], **found}), flush=True)
            taken.clear()


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


def turn(case: dict[str, Any], where: Platform) -> None:
    dtype, head_dim = getattr(torch, case["spec"]["dtype"]), case["spec"]["head_dim"]
    q, k = (sliced(heads * head_dim, dtype).unflatten(-1, (heads, head_dim)) for heads in (16, 4))
    cos, sin = (empty(SEQ_LEN, 1, head_dim // 2, dtype=torch.float32) for _ in range(2))
    for back in (False, True):
        run(rotary.rotary, q, k, cos, sin, back)


def run(operator: Any, *arguments: Any) -> None:
    """Its launches: on meta tensors the dispatcher would ask its fake."""
    operator._init_fn(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
