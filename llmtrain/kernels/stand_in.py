"""Replacement of Triton's GPU driver, for processes that compile kernels and launch none. No torch here."""

from typing import Any


class StandIn:
    """target: a GPUTarget of Triton's, which need not be here."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0
