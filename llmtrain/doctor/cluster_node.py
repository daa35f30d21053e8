"""The state of one rank's machine and device, measured in seconds: a matrix product, memory, versions, limits."""

import os
import platform as host
import resource
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from llmtrain.bench import machine
from llmtrain.doctor import cluster_tools
from llmtrain.doctor.cluster_tools import GpuState
from llmtrain.flops.peaks import find_device
from llmtrain.kernels.platform import Platform, pci_address
from llmtrain.versions import versions

_PACKAGES = ("llmtrain", "torch", "mosaicml", "mosaicml-streaming", "transformers")
_WORDS = (0x5555555555555555, -0x5555555555555556, 0, -1)
"""64-bit patterns of which each bit is written as 0 and as 1, beside equal and unequal bits."""
_LEFT = 2 << 30
"""Bytes of a GPU's memory that the test leaves free."""


@dataclass
class Report:
    """Findings of one rank. Units: product TFLOP/s, bandwidth GB/s, tested, shm and memlock bytes (memlock -1: unlimited), clock
    seconds ahead of rank 0.

    kind: the device's row of flops/peaks.csv, or None. wrong_words: 64-bit words that were read otherwise than written.
    repeats: equal products were equal to the bit. tool_error: reason why the vendor's tool did not answer.
    sees_folder: whether the node sees the run's folder; None: not asked. unreached: addresses of other nodes that this one does not
    reach, by node. error: that ended the measurement.
    """

    rank: int
    node: int
    host: str
    device: str = ""
    kind: str | None = None
    on_gpu: bool = False
    product: float = 0.0
    repeats: bool = True
    bandwidth: float = 0.0
    tested: int = 0
    wrong_words: int = 0
    gpu: GpuState | None = None
    tool_error: str | None = None
    shm: int = 0
    memlock: int = -1
    infiniband: bool = False
    clock: float = 0.0
    sees_folder: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, list[str]] = field(default_factory=dict)
    error: str | None = None


def states(here: Platform) -> dict[str, GpuState] | str:
    """State of this machine's GPUs by PCI address, or the reason why it is not known."""
    if here.vendor == "cpu":
        return {}
    try:
        return cluster_tools.query(here.vendor)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def measure(report: Report, here: Platform) -> None:
    """Measure this rank's device and limits into `report`. The GPU is the current one. Raises what PyTorch raises."""
    from torch.cuda import nccl

    report.device, report.on_gpu = here.device_name, here.vendor != "cpu"
    report.versions = {"python": host.python_version(), **versions(*_PACKAGES)}
    report.memlock = min(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], 2**63 - 1)
    report.infiniband = any(Path("/sys/class/infiniband").glob("*"))
    if Path("/dev/shm").is_dir():
        disk = os.statvfs("/dev/shm")
        report.shm = disk.f_frsize * disk.f_blocks
    if report.on_gpu:
        known = find_device(here.device_name, here.num_sms)
        report.kind = known.short if known else None
        report.versions |= {"driver": machine.driver(here), "NCCL": str(nccl.version())}
    report.product, report.repeats = _product(here)
    report.bandwidth = _bandwidth(here)
    report.tested, report.wrong_words = _pattern(here)


def set_gpu(report: Report, found: dict[str, GpuState] | str, device: int) -> None:
    """Put the state of GPU `device` of this process into `report`. found: of `states`."""
    if isinstance(found, str):
        report.tool_error = found
    elif found:
        address = pci_address(device)
        report.gpu = found.get(cluster_tools.pci_key(address))
        report.tool_error = None if report.gpu else f"the vendor's tool does not list {address}"


def _seconds(work: Callable[[], object], times: int, gpu: bool) -> float:
    """Seconds of one call, of so many after one that does not count."""
    import torch

    wait = torch.cuda.synchronize if gpu else lambda: None
    work()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - began) / times


def _product(here: Platform) -> tuple[float, bool]:
    """TFLOP/s of a square product (8192, bf16 on a GPU; 512, fp32 on a CPU), and whether the last was as the first."""
    import torch

    gpu = here.vendor != "cpu"
    size, dtype, times = (8192, torch.bfloat16, 30) if gpu else (512, torch.float32, 5)
    random = torch.Generator(here.device_type).manual_seed(0)
    left, right = (torch.randn(size, size, generator=random, device=here.device_type).to(dtype) for _ in "ab")
    first, out = left @ right, torch.empty_like(left)
    seconds = _seconds(lambda: torch.mm(left, right, out=out), times, gpu)
    return 2 * size**3 / seconds / 1e12, torch.equal(first, out)


def _bandwidth(here: Platform) -> float:
    """GB/s of a copy inside the device's memory, read and written bytes together."""
    import torch

    gpu = here.vendor != "cpu"
    count = (1 << 30) if gpu else (32 << 20)
    source = torch.ones(count, dtype=torch.uint8, device=here.device_type)
    target = torch.empty_like(source)
    return 2 * count / _seconds(lambda: target.copy_(source), 20 if gpu else 3, gpu) / 1e9


def _pattern(here: Platform) -> tuple[int, int]:
    """(bytes tested, wrong 64-bit words): patterns written to the free memory of a GPU, or 32 MiB of a CPU's, and read."""
    import torch

    gpu = here.vendor != "cpu"
    if gpu:
        torch.cuda.empty_cache()
        size, left = 1 << 30, torch.cuda.mem_get_info()[0] - _LEFT
    else:
        size = left = 32 << 20
    chunks = []
    while left >= size:
        try:
            chunks.append(torch.empty(size // 8, dtype=torch.int64, device=here.device_type))
        except torch.OutOfMemoryError:  # memory in pieces
            break
        left -= size
    wrong = torch.zeros((), dtype=torch.int64, device=here.device_type)
    for word in _WORDS:
        for number, chunk in enumerate(chunks):
            chunk.fill_(word ^ number)  # chunks differ: a wrong address shows, too
        for number, chunk in enumerate(chunks):
            wrong += (chunk != (word ^ number)).sum()
    found = len(chunks) * size, int(wrong)
    chunks.clear()
    if gpu:
        torch.cuda.empty_cache()
    return found
