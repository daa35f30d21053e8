"""Cores of this machine: which CPUs are threads of one core, processes that keep to given ones, and how fast a core alone is.

A machine's own limit on scaling is what a program reaches that needs nothing but its core: the clock falls as more cores are busy,
and two hardware threads share what one core has.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_BLOCK = bytes(1024)
_SPIN = "import benchmarks.harness.cores as cores, sys; cores.spin(int(sys.argv[1]), float(sys.argv[2]))"
_SHARED = 0.85
"""Of its rate alone: what a CPU keeps beside another one of the same core lies below."""


def hash_megabytes(seconds: float) -> float:
    """MB/s of hashing a kilobyte again and again, which needs nothing but a core."""
    began, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        for _ in range(500):
            hashlib.blake2b(_BLOCK).digest()
        done += 500
    return done * len(_BLOCK) / 1e6 / elapsed


def spin(cpu: int, seconds: float) -> None:
    """Hash on one CPU from the moment at which a line is read, and print the rate."""
    os.sched_setaffinity(0, {cpu})
    print("ready", flush=True)
    sys.stdin.readline()
    print(hash_megabytes(seconds), flush=True)


def hash_rates(cpus: Sequence[int], seconds: float = 0.5) -> list[float]:
    """MB/s of each CPU while all of them hash."""
    children = [_spinner(cpu, seconds) for cpu in cpus]
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    return [float(child.communicate()[0]) for child in children]


def _spinner(cpu: int, seconds: float) -> subprocess.Popen[str]:
    """A process that waits for a line."""
    command = [sys.executable, "-c", _SPIN, str(cpu), str(seconds)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "ready\n"
    return child


def physical_cores() -> list[int]:
    """One CPU of each core that this process may use: as the kernel says, unless measuring says otherwise (a virtual machine may
    hide that its CPUs are threads of one core)."""
    cpus = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in cpus:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(file.read_text().strip() if file.is_file() else str(cpu), cpu)
    if len(cores) < len(cpus) or len(cpus) < 4:
        return list(cores.values())
    half = len(cpus) // 2
    if _share(cpus[0], cpus[1]):
        return cpus[::2]
    return cpus[:half] if _share(cpus[0], cpus[half]) else cpus


def _share(one: int, other: int) -> bool:
    alone = max(hash_rates([one], 0.3)[0] for _ in range(2))
    return max(hash_rates([one, other], 0.3)[0] for _ in range(2)) < _SHARED * alone
