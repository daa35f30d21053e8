"""Compiles Triton kernels for a GPU that is not there and says what they take; run as a program, by test_step_compiles.

    python -m tests.support.offline cuda 90 32 < cases.json      (or: hip gfx942 64)

A case is [label, operation, fields of its spec, batch, capacity]. The step is called as on a GPU, with tensors that
have no memory; where it would launch a kernel, the kernel is compiled, with the pointer hints of a real launch.
Prints one JSON line per kernel.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


class Offline:
    """Stands in for Triton's GPU driver."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(kind: str, arch: str, warp_size: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    offline: Any = Offline(GPUTarget(kind, int(arch) if kind == "cuda" else arch, int(warp_size)))
    driver.set_active(offline)
    where = Platform("amd" if kind == "hip" else "nvidia", f"sm{arch}" if kind == "cuda" else arch, "", 1 << 36, 132)
    labels: list[str] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled: Any = launch(self, *args, grid=grid, warmup=True, **options)
        taken = _nvidia(compiled) if kind == "cuda" else _amd(compiled)
        print(json.dumps({"case": labels[-1], "kernel": self.fn.__name__, "shared": compiled.metadata.shared, **taken}))
        return compiled

    JITFunction.run = compile_only
    for label, operation, fields, batch, capacity in json.load(sys.stdin):
        labels.append(label)
        call(operation, fields, batch, capacity, where)


def call(operation: str, fields: dict[str, Any], batch: int, capacity: int, where: Platform) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def half(*shape: int) -> Tensor:
        return empty(*shape, dtype=getattr(torch, fields.get("dtype", "bfloat16")))

    family = operation.removesuffix("_step")
    module = importlib.import_module(f"llmtrain.kernels.{family}.step_triton")
    if family == "attention":
        spec = AttentionSpec(**fields)
        cache = half(batch, spec.n_kv_heads, capacity, spec.head_dim)
        position, first = empty(1, dtype=torch.int64), empty(batch, dtype=torch.int32)
        module.build(spec, where, "")(half(batch, spec.n_heads, spec.head_dim), cache, cache, position, first)
    elif family == "ssd":
        spec = SSDSpec(**fields)
        heads, shared = empty(spec.n_heads), half(batch, spec.n_groups, spec.d_state)
        state = empty(batch, spec.n_heads, spec.head_dim, spec.d_state)
        x, dt = half(batch, spec.n_heads, spec.head_dim), half(batch, spec.n_heads)
        module.build(spec, where, "")(x, dt, heads, shared, shared, heads, heads, state)
    else:
        spec = Conv1dSpec(**fields)
        window = half(batch, spec.width - 1, spec.channels).transpose(1, 2)
        weight, bias = half(spec.channels, spec.width), half(spec.channels)
        module.build(spec, where, "")(half(batch, spec.channels), window, weight, bias)


def _nvidia(compiled: Any) -> dict[str, int]:
    """From the cubin; what spills lives on the stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {"registers": _number(r"REG:(\d+)", usage), "spilled": _number(r"STACK:(\d+)", usage)}


def _amd(compiled: Any) -> dict[str, int]:
    """From the assembly. Spilled: registers, or bytes of private memory."""
    text = compiled.asm["amdgcn"]
    spills = [_number(rf"\.{what}: +(\d+)", text) for what in ("vgpr_spill_count", "private_segment_fixed_size")]
    return {"registers": _number(r"\.vgpr_count: +(\d+)", text), "spilled": max(spills)}


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[-2000:]}"
    return int(found[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
