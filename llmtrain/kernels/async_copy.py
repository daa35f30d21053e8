"""What the CPU makes for the GPU while that is at work."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy from pageable memory would wait for what the GPU is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
