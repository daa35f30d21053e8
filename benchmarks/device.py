"""The device that a benchmark runs on."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """Name of a GPU, or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
