"""Copies from the CPU to a GPU that do not wait for the GPU's work."""

import torch
from torch import Tensor


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`, copied from pinned memory: a copy from pageable memory would wait for the GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
