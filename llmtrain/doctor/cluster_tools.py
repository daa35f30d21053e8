"""State of GPUs by their vendors' tools, nvidia-smi and amd-smi: one reader for each vendor."""

import csv
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain.errors import UserError
from llmtrain.kernels.platform import Vendor

_SECONDS = 15.0
"""Time for one answer of a tool."""

_NVIDIA = (
    "--query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total",
    "--query-remapped-rows=gpu_bus_id,remapped_rows.correctable,remapped_rows.uncorrectable,remapped_rows.pending,"
    "remapped_rows.failure",
    "--query-compute-apps=gpu_bus_id,pid,process_name",
)
_AMD = ("list", "metric --ecc", "bad-pages", "process")


@dataclass(frozen=True)
class GpuState:
    """State of one GPU's memory, and who uses it. None: the tool does not say.

    uncorrected: errors that ECC could not correct. remapped: rows (NVIDIA) or pages (AMD) that were replaced or retired.
    pending: a row or page waits for a reset of the GPU. failed: no spare row was left.
    processes: `pid name` of each process on it.
    """

    uncorrected: int | None = None
    remapped: int | None = None
    pending: bool = False
    failed: bool = False
    processes: tuple[str, ...] = ()


def query(vendor: Vendor) -> dict[str, GpuState]:
    """State of each GPU of this machine, by `pci_key`. Raises OSError, SubprocessError or UserError where the tool does not
    answer, or not as expected."""
    if vendor == "nvidia":
        return nvidia(*(_output("nvidia-smi", asked, "--format=csv,noheader,nounits") for asked in _NVIDIA))
    return amd(*(_output("amd-smi", *asked.split(), "--json") for asked in _AMD))


def pci_key(address: str) -> str:
    """One name for a PCI address: `00000000:18:00.0`, `0000:18:00.0` and `0:18:0` are the same. Raises UserError."""
    found = re.fullmatch(r"([0-9a-fA-F]+):([0-9a-fA-F]+):([0-9a-fA-F]+)(\.\d)?", address.strip())
    if found is None:
        raise UserError(f"{address!r} is no PCI address")
    return ":".join(f"{int(part, 16):x}" for part in found.groups()[:3])


def nvidia(gpus: str, rows: str, processes: str) -> dict[str, GpuState]:
    """State of GPUs by the three answers of nvidia-smi, in CSV without a header. Raises UserError."""
    errors = {pci_key(bus): _count(count) for bus, count in _lines(gpus, 2)}
    remapped = {pci_key(bus): values for bus, *values in _lines(rows, 5)}
    users = defaultdict[str, list[str]](list)
    for bus, pid, name in _lines(processes, 3):
        users[pci_key(bus)].append(f"{pid} {name}")
    found = {}
    for key, uncorrected in errors.items():
        corrected, lost, pending, failed = (_count(value) for value in remapped.get(key, ["N/A"] * 4))
        total = None if corrected is None else corrected + (lost or 0)
        found[key] = GpuState(uncorrected, total, bool(pending), bool(failed), tuple(users[key]))
    return found


def amd(listed: str, metrics: str, pages: str, processes: str) -> dict[str, GpuState]:
    """State of GPUs by the four answers of amd-smi, in JSON. Raises UserError."""
    errors, bad, users = (_by_gpu(text) for text in (metrics, pages, processes))
    found = {}
    for number, gpu in _by_gpu(listed).items():
        ecc, retired = errors.get(number, {}).get("ecc"), bad.get(number, {})
        uncorrected = _count(ecc.get("total_uncorrectable_count")) if isinstance(ecc, dict) else None
        running = [one.get("process_info", one) for one in users.get(number, {}).get("process_list", [])]
        named = tuple(f"{one['pid']} {one.get('name', '')}".strip() for one in running if isinstance(one, dict))
        count = {kind: len(of) if isinstance(of := retired.get(kind), list) else 0 for kind in ("retired", "pending")}
        total = sum(count.values()) if retired else None
        found[pci_key(gpu["bdf"])] = GpuState(uncorrected, total, count["pending"] > 0, False, named)
    return found


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout


def _lines(text: str, columns: int) -> Iterator[list[str]]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == columns:
            yield [value.strip() for value in row]
        elif row and ":" in row[0]:  # others are sentences, as where there is no such GPU
            raise UserError(f"nvidia-smi answered {','.join(row)!r}, which are not {columns} values")


def _count(value: Any) -> int | None:
    """A count, or yes and no; None for what a GPU does not have (`[N/A]`)."""
    text = str(value).strip().lower()
    return {"yes": 1, "no": 0}.get(text, int(text) if text.isdigit() else None)


def _by_gpu(text: str) -> dict[int, dict[str, Any]]:
    """Entries of an answer by the number of the GPU; newer versions wrap the list."""
    try:
        found = json.loads(text)
        entries = found["gpu_data"] if isinstance(found, dict) else found
        return {int(entry["gpu"]): entry for entry in entries}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"amd-smi's answer cannot be read ({type(error).__name__}: {error})") from None
