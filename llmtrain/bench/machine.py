"""Facts about this machine and what is installed on it."""

import importlib.util
import platform as host
import subprocess
from importlib.metadata import PackageNotFoundError

from llmtrain import versions
from llmtrain.kernels import tuning
from llmtrain.kernels.platform import Platform

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "composer": "mosaicml",
    "streaming": "mosaicml-streaming",
    "transformers": "transformers",
}
OPTIONAL = ("flash_attn", "mamba_ssm", "causal_conv1d")


def facts(here: Platform) -> list[tuple[str, str]]:
    """(what, its value)."""
    found = [
        ("machine", f"{host.machine()}, Python {host.python_version()}"),
        ("vendor", here.vendor),
        ("architecture", here.arch),
        ("device", here.device_name or "unknown"),
        ("memory", f"{here.memory_bytes / 2**30:.1f} GiB"),
    ]
    if here.vendor != "cpu":
        import torch

        free, total = torch.cuda.mem_get_info()
        found[-1] = ("memory", f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free; {here.num_sms} processors")
        found += [("GPUs", str(torch.cuda.device_count())), ("driver", driver(here))]
        found.append(("tuning table", tuning_table(here)))
    found += [(name, version(package) or "not installed") for name, package in PACKAGES.items()]
    found += [(name, _optional(name)) for name in OPTIONAL]
    return found


def tuning_table(here: Platform) -> str:
    """The tuning table that launches come from, and the user's own rows, if any."""
    try:
        arch = tuning.nearest(here)
    except ValueError as error:
        return str(error)
    measured = sum(not isinstance(row.provenance, str) for row in tuning.read_shipped(arch).rows)
    text = f"{arch}, {measured} of {len(tuning.read_shipped(arch).rows)} rows measured"
    own = tuning.own_file(here.arch)
    return text + (f"; your own rows: {own}" if own.exists() else "")


def driver(here: Platform) -> str:
    import torch

    if here.vendor == "amd":
        return f"ROCm {torch.version.hip}"
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
        return f"{done.stdout.splitlines()[0]}, CUDA {torch.version.cuda} in PyTorch"
    except (OSError, subprocess.SubprocessError, IndexError):
        return f"unknown (nvidia-smi does not answer), CUDA {torch.version.cuda} in PyTorch"


def version(package: str) -> str | None:
    try:
        return versions.version(package)
    except PackageNotFoundError:
        return None


def _optional(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return "not installed (optional)"
    return version(name.replace("_", "-")) or "installed"
