"""Launches without Triton's look at the arguments: of the kernel that Triton would launch, with the same arguments."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from llmtrain.bench.tune.compiling import StandIn
from llmtrain.kernels import launch
from llmtrain.kernels.launch import Descriptor, Kernel, cdiv, jit, next_power_of_2


def add(x, y, out, n, scale, WIDTH: tl.constexpr, MASKED: tl.constexpr = False):  # pyright: ignore[reportArgumentType]
    pass


class Compiled:
    """A compiled kernel that notes what it is launched with."""

    def __init__(self, key: str, backend: str, launches: list[tuple[str, tuple[Any, ...]]]):
        self.key, self.launches = key, launches
        self.function, self.packed_metadata = f"function of {key}", f"metadata of {key}"
        self.metadata = SimpleNamespace(target=GPUTarget(backend, 90, 32))

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        self.launches.append((self.key, args))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Launches, by the text that Triton finds kernels by, of a GPU that is not there."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    monkeypatch.setattr(driver, "_active", StandIn(GPUTarget("cuda", 90, 32)))

    def compiled(self: Any, key: str, *rest: Any) -> Compiled:
        kernel = self.device_caches[0][0][key] = Compiled(key, "cuda", found)
        return kernel

    monkeypatch.setattr(JITFunction, "_do_compile", compiled)
    return found


def aligned(dtype: torch.dtype = torch.float32, offset: int = 0) -> Tensor:
    memory = torch.zeros(256, dtype=dtype)
    start = -memory.data_ptr() % 16 // memory.element_size()
    return memory[start + offset :]


def test_a_kept_launch_is_tritons_own_with_addresses_for_tensors(launches: list[Any]):
    kernel, x, out = jit(add), aligned(), aligned(torch.bfloat16)
    for _ in range(2):
        kernel[3, 2](x, None, out, 48, 0.5, WIDTH=4, num_warps=2)
    (key, first), (again, second) = launches
    assert key == again and first[:6] == second[:6] == (3, 2, 1, 0, f"function of {key}", f"metadata of {key}")
    assert first[9:] == (x, None, out, 48, 0.5, 4, False)
    assert second[9:] == (x.data_ptr(), None, out.data_ptr(), 48, 0.5, 4, False)


ARGUMENTS: dict[str, list[Any]] = {
    "x": [None, *(aligned(dtype, offset) for dtype in (torch.float32, torch.bfloat16) for offset in (0, 1))],
    "y": [1.0, 2.0, True, False, aligned()],
    "n": [
        0,
        1,
        2,
        16,
        17,
        -16,
        (1 << 31) - 1,
        1 << 31,
        1 << 32,
        (1 << 32) + 1,
        -(1 << 31),
        -(1 << 31) - 16,
        (1 << 63) + 16,
    ],
    "scale": [0.0, 1.0, 1, 3],
}
CONSTANTS: list[dict[str, Any]] = [
    {"WIDTH": 1},
    {"WIDTH": True},
    {"WIDTH": 1.0},
    {"WIDTH": 1, "MASKED": True},
    {"WIDTH": 1, "num_warps": 8},
]


def test_no_kernel_is_launched_with_arguments_for_which_triton_would_compile_another(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "MAX_KEPT", 10_000)
    ours, theirs, out = jit(add), triton.jit(add), aligned()
    calls = [
        ((x, y, out, n, scale), constants)
        for x, y, n, scale in itertools.product(*ARGUMENTS.values())
        for constants in CONSTANTS[:1] + CONSTANTS[3:]
    ]
    for kernel in (theirs, ours, ours):
        for args, constants in calls:
            kernel[(1,)](*args, **constants)
    keys = [key for key, _ in launches]
    wanted, first, again = (keys[i * len(calls) : (i + 1) * len(calls)] for i in range(3))
    assert first == wanted and again == wanted
    assert isinstance(ours, Kernel) and len(ours.kept) >= len(set(wanted)) > 500


def test_constants_that_are_equal_but_of_other_types_are_kept_apart(launches: list[Any]):
    kernel, x = jit(add), aligned()
    for constants in CONSTANTS:
        kernel[(1,)](x, x, x, 16, 1.0, **constants)
    assert isinstance(kernel, Kernel) and len(kernel.kept) == len(CONSTANTS)


def test_a_descriptor_is_passed_on_and_known_by_its_format_and_block(launches: list[Any]):
    kernel, x = jit(add), torch.zeros(64, 64)
    made = [
        Descriptor(t, [64, 64], [64, 1], block)
        for t in (x, x.bfloat16())
        for block in ([16, 64], [32, 64])
        for _ in range(2)
    ]
    for descriptor in made:
        kernel[(1,)](descriptor, x, x, 16, 1.0, WIDTH=1)
    keys = [key for key, _ in launches]
    assert keys[::2] == keys[1::2] and len(set(keys)) == 4
    assert all(args[9] is descriptor for (_, args), descriptor in zip(launches, made, strict=True))
    plain = TensorDescriptor(x, [64, 64], [64, 1], [16, 64])
    kernel[(1,)](plain, x, x, 16, 1.0, WIDTH=1)
    assert launches[-1][0] == keys[0] and isinstance(kernel, Kernel) and len(kernel.kept) == 4


def test_hooks_see_every_launch(launches: list[Any], monkeypatch: pytest.MonkeyPatch):
    kernel, x = jit(add), aligned()
    ran: list[int] = []
    run = JITFunction.run
    kernel[(1,)](x, x, x, 16, 1.0, WIDTH=1)
    for hook in (lambda: knobs.runtime.launch_enter_hook, lambda: knobs.runtime.launch_exit_hook):
        chain: Any = hook()
        chain.add(print)
        assert launch.hooked()
        chain.remove(print)
        assert not launch.hooked()

    def patched(self: Any, *args: Any, **options: Any) -> Any:
        ran.append(1)
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", patched)
    kernel[(1,)](x, x, x, 16, 1.0, WIDTH=1)
    kernel[(1,)](x, x, x, 16, 1.0, WIDTH=2)
    assert ran == [1, 1] and isinstance(kernel, Kernel) and len(kernel.kept) == 1


def test_on_amd_nothing_is_kept(launches: list[Any], monkeypatch: pytest.MonkeyPatch):
    """AMD's code depends on the size of a tensor's memory too."""
    kernel, x = jit(add), aligned()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *rest: Compiled(key, "hip", launches))
    kernel[(1,)](x, x, x, 16, 1.0, WIDTH=5)
    assert isinstance(kernel, Kernel) and not kernel.kept


def test_constants_by_position_are_known_by_their_values(launches: list[Any]):
    kernel, x = jit(add), aligned()
    for width in (4, 8, 4, 1):
        kernel[(1,)](x, x, x, 16, 1.0, width)
    four, eight, again, one = (key for key, _ in launches)
    assert four == again and len({four, eight, one}) == 3
    assert isinstance(kernel, Kernel) and len(kernel.kept) == 3
    assert [args[14:] for _, args in launches][:3] == [(4, False), (8, False), (4, False)]


def test_launches_can_be_left_to_triton(monkeypatch: pytest.MonkeyPatch):
    assert type(jit(add)) is Kernel
    monkeypatch.setenv(launch.HOW, "triton")
    assert type(jit(add)) is JITFunction


def test_a_kernel_keeps_a_bounded_number_of_launches(launches: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "MAX_KEPT", 3)
    kernel, x = jit(add), aligned()
    for width in (1, 2, 3, 4, 5, 5, 1):
        kernel[(1,)](x, x, x, 16, 1.0, WIDTH=width)
    assert isinstance(kernel, Kernel) and len(kernel.kept) == 3
    assert [args[14] for _, args in launches] == [1, 2, 3, 4, 5, 5, 1]


def test_integers_for_grids_are_tritons():
    for a, b in itertools.product(range(40), (1, 3, 16)):
        assert cdiv(a, b) == triton.cdiv(a, b)
    assert [next_power_of_2(n) for n in range(1, 200)] == [triton.next_power_of_2(n) for n in range(1, 200)]
