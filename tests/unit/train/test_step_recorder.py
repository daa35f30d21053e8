"""The parts of a step from what PyTorch's profiler recorded on a GPU."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from llmtrain.train.callbacks.step_recorder import breakdown

CPU, GPU = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


@dataclass
class Event:
    """An event as Kineto gives it, which answers calls. number: by which kernels and the calls that launch them belong together."""

    _name: str
    _start_ns: int
    _end_ns: int
    _correlation_id: int = 0
    _device_type: Any = CPU
    _is_user_annotation: bool = False

    def __getattr__(self, name: str) -> Any:
        return lambda: self.__dict__[f"_{name}"]


def test_a_kernel_belongs_to_the_call_that_launched_it_and_not_to_an_operator_of_the_same_number():
    events = [
        Event("llmtrain.step", 0, 1000, _is_user_annotation=True),
        Event("llmtrain.data", 0, 100, _is_user_annotation=True),
        Event("Optimizer.step#AdamW.step", 600, 900, _is_user_annotation=True),
        Event("cudaGraphLaunch", 120, 130, 7),
        Event("cuLaunchKernelEx", 610, 620, 8),
        Event("aten::mul", 650, 700, 7),
        Event("gemm", 200, 500, 7, GPU),
        Event("gemm", 500, 560, 7, GPU),
        Event("multi_tensor_apply_kernel", 700, 960, 8, GPU),
    ]
    results = SimpleNamespace(events=lambda: events)
    profiler: Any = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    found = {name: round(1e9 * seconds) for name, seconds in breakdown(profiler, 1).parts.items() if seconds}
    assert found == {"products": 360, "optimizer": 260, "data wait": 100, "gaps": 280}
