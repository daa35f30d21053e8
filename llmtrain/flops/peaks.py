"""Peak FLOP/s of GPUs, dense (no structured sparsity), per device as torch sees it. No torch here.

Datasheets that print only figures "with sparsity" (NVIDIA since Hopper) are halved; `source` says so. MI250 and
MI250X are two chips in one package and torch shows each chip (GCD) as a device, so their rows hold half of the
package's figures. A GB200 or GB300 superchip is two devices, and its rows hold one. A device that is not in the table
has no peak, and no MFU unless train.peak_tflops gives one: a wrong one is worse.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UserError

TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One row of peaks.csv.

    short: name for the command line.
    names: what torch.cuda.get_device_name() returns, compared after `normalise`.
    tflops: dense peak in TFLOP/s by number format. `fp32` is the best rate without reduced precision (CUDA cores on
        NVIDIA, matrix cores on AMD); `tf32` needs torch's TF32 switch.
    compute_units: multiprocessors (NVIDIA) or compute units (AMD), to tell a whole device from a slice of one.
    memory_gb: memory in 10^9 bytes.
    """

    short: str
    title: str
    names: tuple[str, ...]
    tflops: Mapping[str, float]
    compute_units: int
    memory_gb: float
    source: str

    def peak(self, precision: str) -> float | None:
        """Dense peak in FLOP/s, or None when the datasheet gives none.

        precision: a column of the table, or train.precision, whose amp_bf16 computes in bf16.
        """
        column = precision.removeprefix("amp_")
        return self.tflops[column] * TERA if column in self.tflops else None


def _read(file: Path) -> Iterator[Device]:
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            tflops = {name: float(row[name]) for name in ("bf16", "fp16", "tf32", "fp32", "fp8") if row[name]}
            size = float(row["memory_gb"])
            yield Device(
                row["short"],
                row["title"],
                tuple(row["names"].split(" | ")),
                tflops,
                int(row["compute_units"]),
                size,
                row["source"],
            )


DEVICES = tuple(_read(Path(__file__).with_name("peaks.csv")))


def normalise(name: str) -> tuple[str, ...]:
    """Words of a device name in lower case, without the vendor's: `NVIDIA A100-SXM4-80GB` -> a100, sxm4, 80gb."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return tuple(word for word in words if word not in ("nvidia", "amd", "instinct"))


# Names that more than one row answers to, or that may stand for a slice: only the compute units distinguish them.
# "MI250X/MI250" is what amdgpu.ids calls both packages; VF is a virtual machine's share of the GPU.
_AMBIGUOUS = {
    normalise("AMD Instinct MI250X/MI250"): ("mi250", "mi250x"),
    normalise("AMD Instinct MI300X VF"): ("mi300x",),
    normalise("AMD Instinct MI325X VF"): ("mi325x",),
    normalise("AMD Instinct MI350X VF"): ("mi350x",),
    normalise("AMD Instinct MI355X VF"): ("mi355x",),
}

_BY_NAME = {normalise(name): device for device in DEVICES for name in device.names}
_BY_SHORT = {device.short: device for device in DEVICES}


def find_device(name: str, compute_units: int | None = None) -> Device | None:
    """The row for a name that torch reports, or None when it is not known for certain.

    name: torch.cuda.get_device_name(). Every word must match: an A10G is no A10 and no A100.
    compute_units: torch.cuda.get_device_properties().multi_processor_count, when known. A MIG slice, a partition
        (MI300X in CPX mode) or a custom chip under a known name has another count, and gets None.
    """
    words = normalise(name)
    if words in _AMBIGUOUS:
        rows = [_BY_SHORT[short] for short in _AMBIGUOUS[words]]
        return next((row for row in rows if row.compute_units == compute_units), None)
    device = _BY_NAME.get(words)
    if device is None or (compute_units is not None and compute_units != device.compute_units):
        return None
    return device


def device_by_short_name(short: str) -> Device:
    """The row for a command-line name such as `h200` or `mi300x`. Raises UserError that lists the names."""
    device = _BY_SHORT.get(short.lower())
    if device is None:
        close = [name for name in _BY_SHORT if name.startswith(short.lower() + "-")]
        hint = f"; did you mean {' or '.join(close)}?" if close else f"; known: {', '.join(_BY_SHORT)}"
        raise UserError(
            f"no peak is known for GPU '{short}'{hint}; train.peak_tflops (for `mfu`, --peak) gives another"
        )
    return device


@dataclass(frozen=True)
class Peak:
    """Dense peak of one GPU in FLOP/s, None when it is not known. source: where it comes from, or why it is not known."""

    flops: float | None
    source: str


def dense_peak(device: Device | None, precision: str, tflops: float | None = None, name: str = "this device") -> Peak:
    """The peak at a train.precision. tflops: train.peak_tflops, which goes before the table. name: of an unknown device."""
    if tflops is not None:
        return Peak(tflops * TERA, "train.peak_tflops")
    found = device.peak(precision) if device else None
    if device and found:
        return Peak(found, device.title)
    what = f"{device.title} at train.precision {precision}" if device else name
    return Peak(None, f"no peak is known for {what}; set train.peak_tflops to its dense TFLOP/s")
