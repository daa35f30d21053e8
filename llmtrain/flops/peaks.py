"""Peak FLOP/s of GPUs, dense (no structured sparsity), per device as torch sees it. No torch here.

Datasheets that print only figures "with sparsity" (NVIDIA since Hopper) are halved; `source` says so. MI250 and
MI250X are two chips in one package and torch shows each chip (GCD) as a device, so their rows hold half of the
package's figures. A GB200 or GB300 superchip is two devices, and its rows hold one. A device that is not in the table
has no peak, and no MFU unless train.peak_tflops gives one: a wrong one is worse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.errors import UserError

TERA = 1e12


@dataclass(frozen=True)
class Device:
    """One row of the table.

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


_A100 = {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5}
_A100_SOURCE = "NVIDIA A100 Tensor Core GPU datasheet (nvidia-a100-datasheet-us-nvidia-1758950), dense column"
_HOPPER_SXM = {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67.0, "fp8": 1979.0}
_HOPPER_NVL = {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0, "fp8": 1670.5}
_CDNA3 = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp8": 2614.9}

DEVICES: tuple[Device, ...] = (
    Device(
        "a100",
        "NVIDIA A100 80GB",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB"),
        _A100,
        108,
        80,
        _A100_SOURCE,
    ),
    Device(
        "a100-40gb",
        "NVIDIA A100 40GB",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        _A100,
        108,
        40,
        _A100_SOURCE,
    ),
    Device(
        "h100-sxm",
        "NVIDIA H100 SXM",
        ("NVIDIA H100 80GB HBM3",),
        _HOPPER_SXM,
        132,
        80,
        "NVIDIA H100 Tensor Core GPU datasheet, H100 SXM: BF16 1,979 TFLOP/s with sparsity, halved",
    ),
    Device(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        ("NVIDIA H100 PCIe",),
        {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.0, "fp8": 1513.0},
        114,
        80,
        "NVIDIA H100 Tensor Core GPU datasheet (2022-2023), H100 PCIe: BF16 1,513 TFLOP/s with sparsity, halved",
    ),
    Device(
        "h100-nvl",
        "NVIDIA H100 NVL",
        ("NVIDIA H100 NVL",),
        _HOPPER_NVL,
        132,
        94,
        "NVIDIA H100 Tensor Core GPU datasheet (2024), H100 NVL: BF16 1,671 TFLOP/s with sparsity, halved",
    ),
    Device(
        "h200",
        "NVIDIA H200 SXM",
        ("NVIDIA H200",),
        _HOPPER_SXM,
        132,
        141,
        "NVIDIA H200 Tensor Core GPU datasheet, H200 SXM: BF16 1,979 TFLOP/s with sparsity, halved",
    ),
    Device(
        "h200-nvl",
        "NVIDIA H200 NVL",
        ("NVIDIA H200 NVL",),
        _HOPPER_NVL,
        132,
        141,
        "NVIDIA H200 Tensor Core GPU datasheet, H200 NVL: BF16 1,671 TFLOP/s with sparsity, halved",
    ),
    Device(
        "b200",
        "NVIDIA B200",
        ("NVIDIA B200",),
        {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 75.0, "fp8": 4500.0},
        148,
        180,
        "NVIDIA HGX platform page, HGX B200 (8 GPUs): BF16 36 PFLOP/s with sparsity; and Blackwell datasheet, TF32 2.2",
    ),
    Device(
        "gb200",
        "NVIDIA GB200 (one of its two GPUs)",
        ("NVIDIA GB200",),
        {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp8": 5000.0},
        152,
        186,
        "NVIDIA Blackwell datasheet, GB200 NVL72, per GPU: BF16 5 PFLOP/s with sparsity, halved",
    ),
    Device(
        "b300",
        "NVIDIA B300",
        ("NVIDIA B300 SXM6 AC",),
        {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp8": 4500.0},
        148,
        270,
        "NVIDIA HGX platform page, HGX B300 (8 GPUs): BF16 36, TF32 18 PFLOP/s with sparsity, halved",
    ),
    Device(
        "gb300",
        "NVIDIA GB300 (one of its two GPUs)",
        ("NVIDIA GB300",),
        {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 80.0, "fp8": 5000.0},
        152,
        279,
        "NVIDIA GB300 NVL72 page (72 GPUs): BF16 360 PFLOP/s with sparsity, halved",
    ),
    Device(
        "h20",
        "NVIDIA H20",
        ("NVIDIA H20",),
        {"bf16": 148.0, "fp16": 148.0, "tf32": 74.0, "fp32": 44.0, "fp8": 296.0},
        78,
        96,
        "NVIDIA HGX H20 specification as its resellers print it, dense figures",
    ),
    Device(
        "a10g",
        "NVIDIA A10G",
        ("NVIDIA A10G",),
        {"bf16": 70.0, "fp16": 70.0, "tf32": 35.0, "fp32": 35.0},
        80,
        24,
        "NVIDIA A10G datasheet (AWS G5), dense: BF16 70 TFLOP/s, half of an A10's rate",
    ),
    Device(
        "l4",
        "NVIDIA L4",
        ("NVIDIA L4",),
        {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3, "fp8": 242.5},
        58,
        24,
        "NVIDIA L4 datasheet: BF16 242 TFLOP/s with sparsity, halved",
    ),
    Device(
        "l40s",
        "NVIDIA L40S",
        ("NVIDIA L40S",),
        {"bf16": 362.05, "fp16": 362.05, "tf32": 183.0, "fp32": 91.6, "fp8": 733.0},
        142,
        48,
        "NVIDIA L40S datasheet, dense figures",
    ),
    Device(
        "mi210",
        "AMD Instinct MI210",
        ("AMD Instinct MI210",),
        {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3},
        104,
        64,
        "AMD Instinct MI210 accelerator data sheet, peak matrix figures",
    ),
    Device(
        "mi250",
        "AMD Instinct MI250 (one of its two GCDs)",
        ("AMD Instinct MI250",),
        {"bf16": 181.05, "fp16": 181.05, "fp32": 45.25},
        104,
        64,
        "AMD Instinct MI200 series data sheet, MI250: 362.1 bf16, 90.5 fp32 matrix TFLOP/s a package, halved per GCD",
    ),
    Device(
        "mi250x",
        "AMD Instinct MI250X (one of its two GCDs)",
        ("AMD Instinct MI250X",),
        {"bf16": 191.5, "fp16": 191.5, "fp32": 47.85},
        110,
        64,
        "AMD Instinct MI200 series data sheet, MI250X: 383.0 bf16, 95.7 fp32 matrix TFLOP/s a package, halved per GCD",
    ),
    Device(
        "mi300x",
        "AMD Instinct MI300X",
        ("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        _CDNA3,
        304,
        192,
        "AMD Instinct MI300X accelerator data sheet, dense matrix figures",
    ),
    Device(
        "mi325x",
        "AMD Instinct MI325X",
        ("AMD Instinct MI325X", "AMD Instinct MI325X OAM"),
        _CDNA3,
        304,
        256,
        "AMD Instinct MI325X accelerator data sheet, dense matrix figures",
    ),
    Device(
        "mi350x",
        "AMD Instinct MI350X",
        ("AMD Instinct MI350X", "AMD Instinct MI350X OAM"),
        {"bf16": 2300.0, "fp16": 2300.0, "fp32": 144.2, "fp8": 4600.0},
        256,
        288,
        "AMD Instinct MI350X GPU data sheet, dense matrix figures (2.3 and 4.6 PFLOP/s; no TF32 unit)",
    ),
    Device(
        "mi355x",
        "AMD Instinct MI355X",
        ("AMD Instinct MI355X", "AMD Instinct MI355X OAM"),
        {"bf16": 2500.0, "fp16": 2500.0, "fp32": 157.3, "fp8": 5000.0},
        256,
        288,
        "AMD Instinct MI355X GPU data sheet, dense matrix figures (2.5 and 5 PFLOP/s; no TF32 unit)",
    ),
)


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
