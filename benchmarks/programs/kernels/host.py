"""Host's time for one eager forward and backward of each of our operations: what a small model's step is bound by.

    python -m benchmarks host [--only NAME …] [--calls N] [--profile] [--out FILE.json]

Calls are queued without waiting for the device, some at a time, so that its queue never fills; the median of their time is the
host's own. Without a GPU, kernels of an H200 are launched by a stand-in for Triton's driver, which takes a launch's arguments and
does nothing: what is measured is Python, allocation and dispatch, less the driver, and PyTorch's thread of a GPU's backward.
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from benchmarks.harness.arguments import Parser, positive
from benchmarks.harness.report import Report
from llmtrain.bench.tune.compiling import StandIn, platform_of
from llmtrain.kernels import operation as operations
from llmtrain.kernels import platform as platforms
from llmtrain.kernels.operation import Operation, Shape, run_both
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.operation import Rotary

TARGET = GPUTarget("cuda", 90, 32)
BATCH, SEQ_LEN = 1, 256
QUEUED = 10
"""Calls between two waits for the device."""
ATTENTION: dict[str, dict[str, Any]] = {
    "attention 12 on 12 x 64": {"head_dim": 64, "heads": 12},
    "attention 12 on 12 x 64, ALiBi": {"head_dim": 64, "heads": 12, "variant": "alibi"},
    "attention 8 on 2 x 128": {"head_dim": 128, "heads": 8, "kv_heads": 2},
    "attention 10 on 1 x 112, documents, window": {
        "head_dim": 112, "heads": 10, "kv_heads": 1, "variant": "documents+window"
    },
    "attention 8 on 4 x 96, documents": {"head_dim": 96, "heads": 8, "kv_heads": 4, "variant": "documents"},
    "attention 4 on 4 x 192": {"head_dim": 192, "heads": 4},
}  # fmt: skip
"""Attention's rows, as of its `sized`; the other operations have one each."""


class Compiled:
    """Replacement of a compiled kernel, launched as Triton launches its own up to the call into C."""

    launches = 0
    function, packed_metadata = 0, ()

    def __init__(self, signature: dict[str, str]):
        described = sum(str(kind).startswith("tensordesc") for kind in signature.values())
        fields = dict.fromkeys(("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"), 0)
        self.metadata = SimpleNamespace(target=TARGET, tensordesc_meta=[fields] * described)
        self.run: Any = object.__new__(nvidia.CudaLauncher)
        sizes = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
        vars(self.run).update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, **sizes)
        self.run.launch = nvidia.wrap_handle_tensordesc(self.launch, signature, self.metadata.tensordesc_meta)

    def launch_metadata(self, *args: Any) -> None:
        return None

    def launch(self, *args: Any) -> None:
        Compiled.launches += 1


def stand_in() -> Platform:
    """Replace Triton's driver and compiler in this process, and the platform that operations find."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    active: Any = StandIn(TARGET)
    active.utils = SimpleNamespace(fill_tma_descriptor=lambda *args: args)
    driver.set_active(active)

    def compiled(self: Any, key: str, signature: Any, device: int, *rest: Any) -> Any:
        kernel = self.device_caches[device][0][key] = Compiled(signature)
        return kernel

    JITFunction._do_compile = compiled  # pyright: ignore[reportAttributeAccessIssue]
    platform = platform_of("sm90")
    platforms.detect = lambda device=None: platform
    return platform


def shapes() -> Iterator[tuple[str, Operation, Shape]]:
    for name in operations.NAMES:
        one = operations.operation(name)
        if name == "attention":
            for label, sizes in ATTENTION.items():
                yield label, one, one.sized(seq_len=SEQ_LEN, tokens=BATCH * SEQ_LEN, **sizes)
        else:
            yield name, one, replace(next(one.shapes(False)), batch=BATCH, seq_len=SEQ_LEN)


def calls(one: Operation, shape: Shape, platform: Platform, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward alone, and forward and backward."""
    tensors, up = one.draw(shape, device)
    kernel = one.kernel("triton", shape.spec, platform)
    function = one.bind(kernel, shape, device)
    if isinstance(one, Rotary):  # without the concatenation that joins its outputs for comparisons
        function, up = partial(_rotated, kernel, one.tables(shape.spec, shape.seq_len, device=device)), tuple(tensors)
    tensors = operations.leaves(tensors)
    return torch.no_grad()(partial(function, *tensors)), partial(run_both, function, tensors, up)


def _rotated(kernel: Any, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return kernel(q, k, *tables)


def measure(run: Callable[[], Any], count: int, on_gpu: bool) -> float:
    """Median microseconds of a call, of `count` that are queued some at a time."""
    # Without a GPU the process's own time: others share the processor.
    clock, times = time.perf_counter if on_gpu else time.process_time, []
    for _ in range(max(10, count // QUEUED)):
        if on_gpu:
            torch.cuda.synchronize()
        began = clock()
        for _ in range(QUEUED):
            run()
        times.append((clock() - began) / QUEUED)
    times = times[len(times) // 5 :]  # what is cached is cached
    # Without a GPU the tenth that was disturbed least.
    return 1e6 * (statistics.median(times) if on_gpu else statistics.quantiles(times, n=10)[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__name__, __doc__, out=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows that begin so")
    parser.add_argument("--calls", type=positive, default=500)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available()
    platform, device = platforms.detect() if on_gpu else stand_in(), "cuda" if on_gpu else "cpu"
    report = Report(args.out)
    rows = [row for row in shapes() if row[0].startswith(tuple(args.only or [""]))]
    for label, one, shape in rows:
        forward, both = calls(one, shape, platform, device)
        if label == rows[0][0]:  # a process is slower at first, whatever it runs
            measure(both, args.calls, on_gpu)
        before = Compiled.launches
        both()
        launches = None if on_gpu else Compiled.launches - before
        times = {"forward_us": measure(forward, args.calls, on_gpu), "host_us": measure(both, args.calls, on_gpu)}
        with torch.autograd.set_multithreading_enabled(False):  # PyTorch has a thread for each GPU's backward
            times["one_thread_us"] = measure(both, args.calls, on_gpu)
        report.add(label, **times, launches_count=launches)
        if args.profile:
            profiler = cProfile.Profile()
            profiler.runcall(measure, both, 200, on_gpu)
            pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(45)
    return 0
