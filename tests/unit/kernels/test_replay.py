"""Replayed calls of operators: the launches, memory and results of a call that is not, whatever the addresses and formats.

The kernels here are a stand-in that writes through every pointer a number of all that it is launched with: the kernel, the grid,
its arguments, and what lies at each pointer. A launch with another argument, in another order or to another place changes what
comes out.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from llmtrain.bench.tune.compiling import StandIn, platform_of
from llmtrain.kernels import operation as operations
from llmtrain.kernels import operators, platform, tuning
from llmtrain.kernels.attention import triton_call
from llmtrain.kernels.launch import Kernel
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.replay import Replayed, Tape

TARGET = GPUTarget("cuda", 90, 32)
LAUNCHES: list[str] = []


class Compiled:
    """A compiled kernel, as Triton's for NVIDIA but for what is behind the launcher in C."""

    function, packed_metadata = 0, (4, 1, 0)

    def __init__(self, name: str, signature: dict[str, Any], scratch: int = 0):
        self.name, self.signature = name, [str(kind) for kind in signature.values()]
        described = sum(kind.startswith("tensordesc") for kind in self.signature)
        fields = dict.fromkeys(("swizzle", "elem_size", "elem_type", "block_size", "fp4_padded"), 0)
        self.metadata = SimpleNamespace(target=TARGET, tensordesc_meta=[fields] * described)
        self.run: Any = object.__new__(nvidia.CudaLauncher)
        sizes = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
        vars(self.run).update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, **sizes)
        self.run.global_scratch_size = scratch
        self.run.launch = nvidia.wrap_handle_tensordesc(self.launch, signature, self.metadata.tensordesc_meta)

    def launch_metadata(self, *args: Any) -> None:
        return None

    def launch(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        """rest: eight arguments of the launcher, then the kernel's."""
        values, pointers = iter(rest[8:]), list[int]()
        facts: list[Any] = [self.name, x, y, z, stream, *rest[:5]]
        for kind in self.signature:
            value = next(values)
            if kind.startswith("tensordesc"):  # the map, and for each dimension of it a size and a stride
                pointers.append(value[0])
                facts += [value[1:], *(next(values) for _ in range(2 * len(value[5])))]
            elif kind.startswith("*"):
                pointers.append(value if isinstance(value, int) else value.data_ptr())
            else:
                facts.append(value)
        pointers = [at for at in pointers if at]  # of tensors that are not empty
        facts += [ctypes.string_at(at, 2) for at in pointers]
        LAUNCHES.append(self.name)
        for number, at in enumerate(pointers):
            ctypes.memmove(at, (zlib.crc32(repr((facts, number)).encode()) & 0xFFFF).to_bytes(2, "little"), 2)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is not there. Memory that is allocated has the same numbers every time."""
    active: Any = StandIn(TARGET)
    active.utils = SimpleNamespace(fill_tma_descriptor=lambda *args: args)
    monkeypatch.setattr(driver, "_active", active)
    here = platform_of("sm90")
    monkeypatch.setattr(platform, "detect", lambda device=None: here)
    monkeypatch.setattr(triton_call, "_platform_of", lambda device: here)
    touched: set[Kernel] = set()

    def compiled(self: Any, key: str, signature: Any, *rest: Any) -> Compiled:
        touched.add(self)
        kernel = self.device_caches[0][0][key] = Compiled(f"{self.fn.__name__} {key}", signature)
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    tuning.forget()
    LAUNCHES.clear()
    yield
    torch.use_deterministic_algorithms(before)
    tuning.forget()
    for kernel in touched:
        kernel.kept.clear()
        kernel.device_caches.clear()


def again(tensor: Any, shifted: int = 0) -> Any:
    """A copy elsewhere, of the same strides; its memory begins `shifted` elements behind a multiple of 64 bytes."""
    if not isinstance(tensor, Tensor):
        return tensor
    extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n)
    memory = torch.zeros(extent + shifted + 8, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), shifted).copy_(tensor)


def outcome(call: Callable[..., Any], args: tuple[Any, ...], shifted: int = 0) -> tuple[list[Any], list[str]]:
    """Results, what became of the arguments, and the launches."""
    given = [again(one, shifted) for one in args]
    LAUNCHES.clear()
    found = call(*given)
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    tensors = [one for one in (*results, *given) if isinstance(one, Tensor)]
    shapes = [(one.dtype, tuple(one.shape), one.stride()) for one in results]
    numbers = [zlib.crc32(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for one in tensors]
    return [shapes, *numbers], list(LAUNCHES)


class Calls(TorchDispatchMode):
    """Our operators' calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "llmtrain":
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


def shapes() -> Iterator[tuple[str, Shape]]:
    for name in operations.NAMES:
        one = operations.operation(name)
        if name == "attention":
            for sizes in (
                {"variant": "plain"},
                {"variant": "alibi", "head_dim": 64},
                {"variant": "documents+window", "head_dim": 112, "heads": 10, "kv_heads": 1},
                {"variant": "softcap", "head_dim": 96, "heads": 8, "kv_heads": 4},
            ):
                yield name, one.sized(seq_len=256, tokens=256, **{"heads": 2, **sizes})
        else:
            tiny = name == "experts"  # else with weights of 2 GB
            yield name, replace(next(iter(one.shapes(tiny))), batch=1, seq_len=128)


def calls(name: str, shape: Shape) -> list[tuple[Any, tuple[Any, ...]]]:
    """Operators of a forward and backward pass, each with its arguments, that are replayed."""
    one = operations.operation(name)
    tensors, up = one.draw(shape)
    function = one.bind(one.kernel("triton", shape.spec, platform.detect()), shape, "cpu")
    with Calls() as seen:
        operations.run_both(function, operations.leaves(tensors), up)
    return [(op, args) for op, args in seen.found if isinstance(operators._GRADIENTS[op].launch, Replayed)]


@pytest.mark.parametrize(("name", "shape"), [pytest.param(*one, id=f"{i} {one[0]}") for i, one in enumerate(shapes())])
def test_a_replayed_call_is_the_call(name: str, shape: Shape):
    found = calls(name, shape)
    assert found
    for op, args in found:
        replayed: Any = operators._GRADIENTS[op].launch
        for shifted in (0, 1):
            wanted = outcome(replayed.launch, args, shifted)
            assert wanted[1]
            for _ in range(3):
                assert outcome(replayed, args, shifted) == wanted
    for op, _ in found:
        assert {type(tape) for tape in operators._GRADIENTS[op].launch.tapes.values()} == {Tape}, str(op)


def write(x, y, n, WIDTH: tl.constexpr):
    pass
