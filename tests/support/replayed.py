"""Calls of our operators, to be replayed elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.kernels import operation as operations
from llmtrain.kernels import operators, platform
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.replay import Replayed


class _Calls(TorchDispatchMode):
    """Our operators' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "llmtrain":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def calls(name: str, shape: Shape, device: str, seed: int = 0) -> list[tuple[Replayed, tuple[Any, ...]]]:
    """Replayed operators of a forward and backward pass, with their arguments."""
    one = operations.operation(name)
    tensors, up = one.draw(shape, device, seed)
    function = one.bind(one.kernel("triton", shape.spec, platform.detect(device)), shape, device)
    with _Calls() as seen:
        operations.run_both(function, operations.leaves(tensors), up)
    launches: list[Any] = [operators._GRADIENTS[op].launch for op, _ in seen.found]
    return [(one, args) for one, (_, args) in zip(launches, seen.found, strict=True) if isinstance(one, Replayed)]


def moved(tensor: Any, shifted: int) -> Any:
    """A copy elsewhere, of the same strides; its memory begins `shifted` elements behind where an allocation begins."""
    if not isinstance(tensor, Tensor):
        return tensor
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n)
    memory = tensor.new_zeros(extent + shifted + 8)
    return memory.as_strided(tensor.shape, tensor.stride(), shifted).copy_(tensor)


def under(call: Any, *args: Any) -> Any:
    """The call beneath autograd, as operators call it."""
    with torch._C._AutoDispatchBelowAutograd():
        return call(*args)
