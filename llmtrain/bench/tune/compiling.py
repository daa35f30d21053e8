"""Compilation of Triton kernels without launching them, for a GPU that is here or not, and the resources that they take.

The operation is called as on a GPU, with tensors that have no memory; where it would launch a kernel, the kernel is
compiled, with the pointer hints of a real launch. What was compiled lies in Triton's cache on disk, where a process with
the GPU finds it. Processes of their own do it, because a compiler can hang or crash:

python -m llmtrain.bench.tune.compiling sm90
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.bench.tune.processes import Worker, serve
from llmtrain.kernels.operation import search
from llmtrain.kernels.platform import Platform, triton_target
from llmtrain.kernels.stand_in import StandIn

NUM_SMS = 132  # of the stand-in, where the number matters at all
TENSOR_MEMORY = 512
"""Columns of a Blackwell multiprocessor's tensor memory, in which products are summed (PTX ISA, tcgen05)."""


@dataclass(frozen=True)
class Task:
    """Task of a worker: compile `part` of an operation by `launch`, for the shape `case`.

    case: as of Operation.shape. launch: plain data, None: what the tables say. environment: of the worker.
    """

    operation: str
    case: dict[str, Any]
    part: str
    launch: dict[str, Any] | None = None
    arch: str = "sm90"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Compiled:
    """kernels: name, registers, shared bytes, what spills, matrix instructions, occupancy, and on NVIDIA whether the
    compiler waits for each of Hopper's products in turn, whether products are too narrow, and columns of tensor memory. failed:
    why not, or None.
    """

    kernels: list[dict[str, Any]]
    failed: str | None = None
    seconds: float = 0.0

    @property
    def shared(self) -> int:
        return max((kernel["shared"] for kernel in self.kernels), default=0)

    def problem(self, limit: int | None) -> str | None:
        """Reason for which it must not run, or None. limit: bytes of shared memory."""
        if self.failed:
            return self.failed
        if spilled := [kernel["kernel"] for kernel in self.kernels if kernel["spilled"]]:
            return f"{', '.join(spilled)} spills registers"
        if narrow := [kernel["kernel"] for kernel in self.kernels if kernel.get("narrow")]:
            return f"{', '.join(narrow)} multiplies in TF32 eight columns at a time, which gives wrong results"
        columns = max((kernel.get("tensor_memory", 0) for kernel in self.kernels), default=0)
        if columns > TENSOR_MEMORY:
            return f"takes {columns} columns of tensor memory, of {TENSOR_MEMORY}"
        if limit is not None and self.shared > limit:
            return f"takes {self.shared} bytes of shared memory, of {limit}"
        return None


class Compilers:
    """Processes that compile, `count` at a time. Use as a context manager."""

    def __init__(self, count: int, timeout_s: float = 180.0):
        self.count, self.timeout_s = count, timeout_s
        self._idle: dict[tuple[str, tuple], queue.SimpleQueue[Worker]] = {}
        self._all: list[Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            process.kill()

    def results(self, tasks: Iterable[Task]) -> Iterator[tuple[int, Compiled]]:
        """(index of the task, what came of it), in the order in which they end."""
        with ThreadPoolExecutor(self.count) as threads:
            futures = {threads.submit(self._one, task): i for i, task in enumerate(tasks)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def _one(self, task: Task) -> Compiled:
        key = (task.arch, tuple(sorted(task.environment.items())))
        with self._lock:
            idle = self._idle.setdefault(key, queue.SimpleQueue())
        try:
            process = idle.get_nowait()
        except queue.Empty:
            # Without a GPU: what is compiled needs none, and contexts cost memory and time.
            alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            process = Worker("llmtrain.bench.tune.compiling", task.arch, **alone, **task.environment)
            with self._lock:
                self._all.append(process)
        wanted = {"operation": task.operation, "case": task.case, "part": task.part, "launch": task.launch}
        found = process.ask(wanted, self.timeout_s)
        if found is None:
            process.kill()
            return Compiled(
                [], f"the compiler crashed, or took more than {self.timeout_s:.0f} s: {process.last_words()}"
            )
        idle.put(process)
        return Compiled(**found)


def default_workers() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def platform_of(arch: str) -> Platform:
    """A platform of this architecture, as far as launches depend on it."""
    return Platform("amd" if arch.startswith("gfx") else "nvidia", arch, "", 1 << 36, NUM_SMS)


@contextlib.contextmanager
def compile_only(arch: str) -> Iterator[list[dict[str, Any]]]:
    """Inside, kernels that would be launched are compiled for `arch`, and what they take is listed.

    For a process of its own: Triton keeps the driver that stands in for the GPU's.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    stand_in: Any = StandIn(triton_target(platform_of(arch)))
    driver.set_active(stand_in)
    taken: list[dict[str, Any]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled: Any = launch(self, *args, grid=grid, warmup=True, **options)
        taken.append({"kernel": self.fn.__name__, **_resources(compiled, arch)})
        return compiled

    JITFunction.run = run
    try:
        yield taken
    finally:
        JITFunction.run = launch


@functools.cache  # Triton hands out the same object for each launch of a kernel, and disassembling takes as long as ptxas
def _resources(compiled: Any, arch: str) -> dict[str, int]:
    amd = arch.startswith("gfx")
    assembly = compiled.asm["amdgcn" if amd else "ptx"]
    matrix = sum(assembly.count(name) for name in ("wgmma.mma_async", "mma.sync", "tcgen05.mma", "v_mfma"))
    wide = sum(assembly.count(f"{way}.global.v4.b32") for way in ("ld", "st"))  # 16 bytes a thread; NVIDIA's
    used = {"shared": compiled.metadata.shared, "matrix": matrix, "wide": wide}
    return used | (_amd(assembly) if amd else _nvidia(compiled, arch))


def _nvidia(compiled: Any, arch: str) -> dict[str, int]:
    """Resources from the cubin; spilled registers live on the stack. Occupancy: warps of a multiprocessor, of at most 64.

    Serialized: ptxas may find no registers for products in flight, or meet other writers of their sums (C7511, C7515 of
    its -v). It then waits after every instruction of a product (gsb0), where Triton wanted that once per product.
    Narrow: wgmma of 8 columns in TF32, which read beside their tile on an H200 (Triton 3.6; its issue 10629): wrong sums, or
    an illegal address. Triton makes them where several groups of four warps share 16 columns.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        products = compiled.asm["ptx"].count("wgmma.commit_group")
        waits = _tool("nvdisasm", "-c", "-ndf", file.name).count(", gsb0 ;") if products else 0
    registers, num_warps = _number(r"REG:(\d+)", usage), compiled.metadata.num_warps
    shared_all = (
        233_472 if arch.startswith(("sm9", "sm10")) else 167_936
    )  # of a multiprocessor; 1,024 go to each program
    programs = min(
        65_536 // (-(-registers // 8) * 8 * 32 * num_warps),
        shared_all // (compiled.metadata.shared + 1024),
        64 // num_warps,
    )
    return {
        "registers": registers,
        "spilled": _number(r"STACK:(\d+)", usage),
        "occupancy": programs * num_warps,
        "serialized": int(waits > products * 3 // 2),
        "narrow": int(".m64n8k8.f32.tf32" in compiled.asm["ptx"]),
        "tensor_memory": compiled.metadata.tmem_size or 0,
    }


def _tool(name: str, *words: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([tool, *words], capture_output=True, text=True, check=True).stdout


def _amd(text: str) -> dict[str, int]:
    """Resources from the assembly. Spilled: registers, or bytes of private memory. Occupancy: waves of a SIMD."""
    spills = [_number(rf"\.{what}: +(\d+)", text) for what in ("vgpr_spill_count", "private_segment_fixed_size")]
    return {
        "registers": _number(r"\.vgpr_count: +(\d+)", text),
        "spilled": max(spills),
        "occupancy": _number(r"; Occupancy: (\d+)", text),
    }


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text[-2000:]}"
    return int(found[1])


def done(arch: str, wanted: dict[str, Any]) -> dict[str, Any]:
    began, failed = time.perf_counter(), None
    with compile_only(arch) as kernels:
        try:
            one = search(wanted["operation"], wanted["case"], "meta", platform_of(arch))
            kernels.clear()
            one.runner(wanted["part"], wanted["launch"])()
        except Exception as error:
            while error.__cause__ is not None:  # the innermost function says what is wrong
                error = error.__cause__
            failed = f"{type(error).__name__}: {error}".replace("\n", " ")[-300:]
    return {"kernels": kernels, "failed": failed, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    serve(lambda wanted: done(sys.argv[1], wanted))
