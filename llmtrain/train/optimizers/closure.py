"""The closure that an optimizer's step may be called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The closure's loss, whose gradients it computes, also where the step itself computes none; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
