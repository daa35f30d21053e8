"""Time, memory and error of one contender; peak rates of the machine."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.kernels.cell import OURS, Cell, Contender, Output, Work, device
from llmtrain.errors import named_line
from llmtrain.kernels.operation import relative_error, run_both

REP_MS = 100
"""Of the device's time that one median is taken from."""
_CYCLES_MS = 2_000_000  # of a GPU, at most


@dataclass
class Result:
    """ms: medians of the device's own time. wall_ms: median of forward and backward by the host's clock, called eagerly,
    the device idle before and after; host_ms: of it, until the host has launched everything; 0: not measured.
    memory_mib: peak of forward and backward above the inputs, None where it is not measured.
    share_*: the time that the copy and the matmul of this run say it needs at least, over the time it took.
    errors: relative, of the output and of every gradient, against float64; of several draws the root mean square.
    """

    operation: str
    cell: str
    seq_len: int
    backend: str
    public: bool
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    memory_mib: float | None = None
    share_forward: float = 0.0
    share_backward: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    failed: str | None = None
    wall_ms: float = 0.0
    host_ms: float = 0.0

    @property
    def sum_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def error(self) -> float:
        return max(self.errors.values(), default=0.0)

    def dump(self) -> dict[str, Any]:
        return {**asdict(self), "sum_ms": self.sum_ms, "error": self.error}


@dataclass
class Ceilings:
    """bytes_s: read and written by a copy; flops_s: of a bf16 (CPU: fp32) matrix product."""

    bytes_s: float
    flops_s: float

    def least_ms(self, work: Work) -> float:
        return 1e3 * max(work.bytes / self.bytes_s, work.flops / self.flops_s)


def ceilings() -> Ceilings:
    on_gpu = device() == "cuda"
    size, n = (1 << 30, 8192) if on_gpu else (1 << 24, 512)
    source = torch.empty(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    copy = milliseconds(lambda _: target.copy_(source))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(n, n, device=device(), dtype=dtype) for _ in range(2))
    product = milliseconds(lambda _: a @ b)
    return Ceilings(2 * size / copy * 1e3, 2 * n**3 / product * 1e3)


def milliseconds(run: Callable[[Any], Any], before: Callable[[], Any] = lambda: None, rep_ms: float = REP_MS) -> float:
    """The median of run(before()), of which only run is timed. On a GPU: the device's own time, with nothing in its L2.

    The device sleeps until everything is queued, so that no kernel waits for Python: a training step, too, is queued
    ahead of the device.
    """
    if device() == "cuda":
        return _device_milliseconds(run, before, rep_ms)
    run(before())
    times = []
    for _ in range(5):
        given = before()
        began = time.perf_counter()
        run(given)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def _device_milliseconds(run: Callable[[Any], Any], before: Callable[[], Any], rep_ms: float) -> float:
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    cycles = 0

    def once() -> tuple[float, float]:
        """Milliseconds of the device, and of Python."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        given = before()
        torch.cuda.synchronize()
        flushed.zero_()
        torch.cuda._sleep(cycles)
        queueing = time.perf_counter()
        begin.record()
        run(given)
        end.record()
        queueing = 1e3 * (time.perf_counter() - queueing)
        torch.cuda.synchronize()
        return begin.elapsed_time(end), queueing

    once()
    first = [once() for _ in range(3)]
    cycles = int(2 * max(queueing for _, queueing in first) * _CYCLES_MS)
    count = min(100, max(5, int(rep_ms / 10), int(rep_ms / min(ms for ms, _ in first))))
    return statistics.median(once()[0] for _ in range(count))


def wall_milliseconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Medians of run() by the host's clock, from an idle device with nothing in its L2: until it is idle again, and until the host
    has launched everything.
    """
    on_gpu = device() == "cuda"
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda") if on_gpu else None
    times = []
    for _ in range(5):
        if flushed is not None:
            flushed.zero_()
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((1e3 * (time.perf_counter() - began), 1e3 * (launched - began)))
    wall, host = (statistics.median(each) for each in zip(*times, strict=True))
    return wall, host


def measure(
    cell: Cell, contenders: list[Contender], most: Ceilings, draws: int = 1, rep_ms: float = REP_MS
) -> list[Result]:
    """Results of a cell's contenders, one after the other. The result of one that fails has the reason, and the others go on.

    draws: of inputs, on which ours and the public ones are compared with float64, as many times as the cell says; the first
    is also timed.
    """
    draws *= cell.draws
    leaves, up = cell.inputs(0)
    exact = [t.detach() for t in cell.exact(leaves, up)]
    results = []
    for contender in contenders:
        result = Result(cell.operation, cell.name, cell.seq_len, contender.name, contender.public)
        with _failing(result):
            _measure(cell, contender, leaves, up, exact, most, result, rep_ms)
        results.append(result)
    del leaves, up, exact
    compared = [
        (one, result)
        for one, result in zip(contenders, results, strict=True)
        if (one.public or one.name == OURS) and not result.failed
    ]
    squares = [{name: error**2 for name, error in result.errors.items()} for _, result in compared]
    for seed in range(1, draws):
        leaves, up = cell.inputs(seed)
        exact = [t.detach() for t in cell.exact(leaves, up)]
        for (one, result), sums in zip(compared, squares, strict=True):
            with _failing(result):
                for name, error in _errors(cell, one.make(), leaves, up, exact).items():
                    sums[name] += error**2
    for (_, result), sums in zip(compared, squares, strict=True):
        if not result.failed:
            result.errors = {name: math.sqrt(total / draws) for name, total in sums.items()}
    return results


@contextmanager
def _failing(result: Result) -> Iterator[None]:
    """Record a failure inside the context in the result."""
    try:
        yield
    except Exception as error:
        if "illegal memory access" in str(error):
            raise  # nothing on this GPU can be trusted any more
        result.failed = named_line(error)


def _errors(
    cell: Cell, function: Callable[..., Output], leaves: list[Tensor], up: Output, exact: list[Tensor]
) -> dict[str, float]:
    found = cell.pieces(run_both(function, leaves, up))
    return {name: relative_error(a, b) for name, a, b in zip(cell.names, found, exact, strict=True)}


def _measure(
    cell: Cell, one: Contender, leaves: list[Tensor], up: Output, exact: list[Tensor], most: Ceilings, result: Result,
    rep_ms: float,
) -> None:  # fmt: skip
    torch.compiler.reset()  # else Dynamo gives up compiling a peer after eight shapes
    function = one.make()
    result.errors = _errors(cell, function, leaves, up, exact)
    if device() == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_both(function, leaves, up)
        torch.cuda.synchronize()
        result.memory_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    result.forward_ms = milliseconds(lambda _: function(*leaves), rep_ms=rep_ms)
    wanted = [t for t in leaves if t is not None]
    result.backward_ms = milliseconds(lambda y: torch.autograd.grad(y, wanted, up), lambda: function(*leaves), rep_ms)
    result.wall_ms, result.host_ms = wall_milliseconds(lambda: run_both(function, leaves, up))
    result.share_forward = most.least_ms(cell.forward) / result.forward_ms
    result.share_backward = most.least_ms(cell.backward) / result.backward_ms
