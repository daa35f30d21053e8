"""Vendor and architecture of a device: the only file that asks for them. Importing it does not import torch."""

from __future__ import annotations

import contextlib
import os
import platform as host
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Dtypes that our kernels take, and the bytes of a number."""
Vendor = Literal["nvidia", "amd", "cpu"]


_NO_WGMMA = "DISABLE_MMA_V3"
"""Triton's own switch, which it reads when it compiles; what it compiles with it is cached apart."""

# Bytes of shared memory (AMD: LDS) that one program can have. CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"; AMD's CDNA and RDNA instruction set architecture guides.
_SHARED = {
    "sm80": 166_912,
    "sm86": 101_376,
    "sm87": 166_912,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm103": 232_448,
    "sm120": 101_376,
    "sm121": 101_376,
    "gfx950": 163_840,
}


def shared_limit(arch: str) -> int | None:
    """Bytes of shared memory of one program, or None where it is not known."""
    return _SHARED.get(arch, 65_536 if arch.startswith("gfx") else None)


@dataclass(frozen=True)
class Platform:
    """One device that runs kernels.

    arch: `sm90` (NVIDIA compute capability), `gfx942` (AMD), or `cpu`.
    memory_bytes: of the device.
    num_sms: multiprocessors of a GPU (compute units of AMD's).
    """

    vendor: Vendor
    arch: str
    device_name: str
    memory_bytes: int
    num_sms: int = 1

    @property
    def device_type(self) -> str:
        """The device type of torch; `cuda` also in ROCm builds."""
        return "cpu" if self.vendor == "cpu" else "cuda"

    @property
    def sums_products_in_fp32(self) -> bool:
        """True if torch.mm and torch.addmm of 16-bit matrices can add to a sum in fp32, as cuBLAS does (`out_dtype`)."""
        return self.vendor == "nvidia"


ASSUMED: list[Platform] = []
"""At most one: what `detect` finds in a process that compiles kernels for it and launches none."""

_NAMED = {
    "sm80": "A100",
    "sm86": "A10G",
    "sm89": "L4 L40 L40S",
    "sm90": "H100 H200 H20",
    "sm100": "B200 GB200",
    "sm103": "B300 GB300",
    "gfx90a": "MI210 MI250 MI250X",
    "gfx942": "MI300X MI325X",
    "gfx950": "MI350X MI355X",
}


def named(title: str, memory_bytes: int, num_sms: int) -> Platform:
    """The platform of a GPU that need not be here, by its title, as in `NVIDIA H200 SXM`. Raises UserError for an unknown one."""
    arch = next((arch for arch, names in _NAMED.items() if set(names.split()) & set(title.split())), None)
    if arch is None:
        raise UserError(f"the architecture of {title!r} is not known")
    return Platform("amd" if arch.startswith("gfx") else "nvidia", arch, title, memory_bytes, num_sms)


def cpu() -> Platform:
    """The host's processor."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Platform("cpu", "cpu", host.processor() or host.machine(), memory)


def detect(device: torch.device | str | None = None) -> Platform:
    """The platform of `device`; by default of this process's GPU, or of the CPU where there is none."""
    if ASSUMED:
        return ASSUMED[0]
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return cpu()
    if device.type != "cuda":
        raise UserError(f"device '{device}' is neither a CPU nor a CUDA or ROCm GPU")
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # gcnArchName reads 'gfx942:sramecc+:xnack-'
        vendor, arch = "amd", properties.gcnArchName.split(":")[0]
    else:
        vendor, arch = "nvidia", f"sm{properties.major}{properties.minor}"
    return Platform(vendor, arch, properties.name, properties.total_memory, properties.multi_processor_count)


def gpus_here() -> list[str]:
    """Kinds of this machine's GPUs as their drivers state them, read without a library; empty where there are none."""
    found = set[str]()
    for pattern in ("/proc/driver/nvidia/gpus/*/information", "/sys/class/kfd/kfd/topology/nodes/*/properties"):
        for path in glob(pattern):
            with contextlib.suppress(OSError), open(path, errors="replace") as file:
                found |= {line.strip() for line in file if line.startswith(("Model:", "gfx_target_version "))}
    found.discard("gfx_target_version 0")  # a processor's
    return sorted(found) or ["of a kind that is not stated"] * bool(glob("/dev/nvidia[0-9]*"))


def triton_target(platform: Platform) -> Any:
    """The GPUTarget by which Triton compiles for a GPU, here or not."""
    from triton.backends.compiler import GPUTarget

    if platform.vendor == "nvidia":
        return GPUTarget("cuda", int(platform.arch.removeprefix("sm")), 32)
    return GPUTarget("hip", platform.arch, 64 if platform.arch.startswith("gfx9") else 32)


def pci_address(device: int) -> str:
    """Address of a GPU of this process on the PCI bus, in hexadecimal: `0:18:0`."""
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:x}:{found.pci_bus_id:x}:{found.pci_device_id:x}"


def build_vendor() -> Vendor:
    """The vendor for whose GPUs the installed PyTorch was built; no GPU is touched."""
    import torch

    if torch.version.hip:
        return "amd"
    return "nvidia" if torch.version.cuda else "cpu"


def float8_refusal(platform: Platform) -> str | None:
    """Reason why a device has no float8 matrix products, or None.

    MI300's are of the formats without infinities and negative zero (fnuz), which torchao takes there by itself; all others are
    OCP's e4m3 and e5m2.
    """
    if platform.vendor == "cpu":
        return "a CPU has no float8 units (train.float8.emulate computes what they would, slowly)"
    if platform.vendor == "nvidia":
        if int(platform.arch.removeprefix("sm")) >= 89:
            return None
        return f"{platform.device_name} ({platform.arch}) has no float8 units; those of NVIDIA begin with sm89 (Ada, Hopper)"
    if platform.arch.startswith(("gfx94", "gfx95", "gfx12")):
        return None
    return f"{platform.device_name} ({platform.arch}) has no float8 units; those of AMD begin with gfx942 (MI300)"


def float8_format(platform: Platform) -> str:
    """The name in torch of the e4m3 that a device's units read: MI300's is without negative zero (fnuz), all others' OCP's."""
    return "float8_e4m3fnuz" if platform.arch.startswith("gfx94") else "float8_e4m3fn"


@contextlib.contextmanager
def without_wgmma() -> Iterator[None]:
    """Inside, Triton compiles matrix products with mma.sync, on Hopper too. Elsewhere it does anyway."""
    before = os.environ.get(_NO_WGMMA)
    os.environ[_NO_WGMMA] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_WGMMA]
        else:
            os.environ[_NO_WGMMA] = before


PRESETS: dict[Vendor, dict[str, str]] = {
    # AMD's training launcher (Primus; ROCm's images for PyTorch training). Not measured by us.
    "amd": {
        "HSA_ENABLE_SDMA": "1",
        "HSA_NO_SCRATCH_RECLAIM": "1",
        "GPU_MAX_HW_QUEUES": "2",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "NCCL_CHECKS_DISABLE": "1",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PXN_DISABLE": "1",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "RCCL_MSCCL_ENABLE": "0",
    },
    # torchtitan's launcher. Not measured by us.
    "nvidia": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "cpu": {},
}
