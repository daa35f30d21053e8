"""Compiles the attention kernels for a GPU that is not there and says what they take; run as a program.

    python -m tests.support.offline_attention cuda 90 32 < cases.json      (or: hip gfx942 64)

A case is an object: `label`; what AttentionSpec takes, but scale; and, where they differ from what is below, `kernels`
(forward, dq, dkdv), `seq_len`, `batch`, `causal`, `packed`, and `launch`, the fields of a Launch in place of the table's.
The kernels are called as on a GPU, with slices of one fused projection that have no memory. Prints one JSON line per
kernel; a kernel that does not compile has `failed` in it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.triton import Call
from llmtrain.kernels.attention.triton_launch import KERNELS, Launch
from llmtrain.kernels.platform import Platform
from tests.support import offline


def main(kind: str, arch: str, warp_size: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    stand_in: Any = offline.Offline(GPUTarget(kind, int(arch) if kind == "cuda" else arch, int(warp_size)))
    driver.set_active(stand_in)
    where = Platform("amd" if kind == "hip" else "nvidia", f"sm{arch}" if kind == "cuda" else arch, "", 1 << 36, 132)
    launch = JITFunction.run
    taken: dict[str, Any] = {}

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled: Any = launch(self, *args, grid=grid, warmup=True, **options)
        taken.update(offline._nvidia(compiled) if kind == "cuda" else offline._amd(compiled))
        assembly = compiled.asm["ptx" if kind == "cuda" else "amdgcn"]
        taken["matrix"] = sum(assembly.count(name) for name in ("wgmma.mma_async", "mma.sync", "v_mfma"))
        taken["bulk copies"] = assembly.count("cp.async.bulk.tensor")
        taken["shared"] = compiled.metadata.shared
        return compiled

    JITFunction.run = compile_only
    for case in json.load(sys.stdin):
        for kernel in case.get("kernels", KERNELS):
            taken.clear()
            began = time.perf_counter()
            call = made(case, kernel, where)
            try:
                run(call, kernel)
            except Exception as error:
                while error.__cause__ is not None:  # the innermost function says what is wrong
                    error = error.__cause__
                taken["failed"] = f"{type(error).__name__}: {error}"[-500:]
            seconds = round(time.perf_counter() - began, 1)
            used = asdict(call.launches[kernel])
            print(json.dumps({"case": case["label"], "kernel": kernel, **taken, "launch": used, "seconds": seconds}))
            sys.stdout.flush()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def made(case: dict[str, Any], kernel: Any, where: Platform) -> Call:
    fields = {name: value for name, value in case.items() if name in AttentionSpec.__dataclass_fields__}
    spec = AttentionSpec(**{"n_heads": 8, "n_kv_heads": 8, "scale": 0.1, **fields})
    batch, seq_len = case.get("batch", 2), case.get("seq_len", 4096)
    heads = [spec.n_heads, spec.n_kv_heads, spec.n_kv_heads]
    fused = empty(batch, seq_len, sum(heads) * spec.head_dim, dtype=getattr(torch, spec.dtype))
    qkv = fused.split([h * spec.head_dim for h in heads], dim=-1)
    q, k, v = (t.unflatten(-1, (h, spec.head_dim)) for t, h in zip(qkv, heads, strict=True))
    slopes = None if spec.alibi_max_bias is None else empty(spec.n_heads)
    bounds = [empty(batch, seq_len, dtype=torch.int32) if case.get("packed") else None for _ in range(2)]
    causal, launch = case.get("causal", True), case.get("launch")
    launches: Any = {kernel: Launch(**launch)} if launch else None
    settings = (spec.scale, causal, spec.sliding_window, spec.softcap, slopes, *bounds)
    return Call(q, k, v, *settings, launches=launches, where=where)


def run(call: Call, kernel: str) -> None:
    out = empty(*call.q.shape, dtype=call.q.dtype)
    lse, delta = (empty(call.batch, call.n_heads, call.seq_len) for _ in range(2))
    if kernel == "forward":
        call.forward()
    elif kernel == "dq":
        call.dq(out, lse, out, None, delta)
    else:
        call.dkdv(lse, out, delta)


if __name__ == "__main__":
    main(*sys.argv[1:])
