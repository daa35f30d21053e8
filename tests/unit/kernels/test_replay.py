"""Replayed calls of operators: the launches, memory and results of a call that is not, whatever the addresses and formats.

The kernels here are a stand-in that writes through every pointer a number of all that it is launched with: the kernel, the grid,
its arguments, and what lies at each pointer. A launch with another argument, in another order or to another place changes what
comes out.
"""

import ctypes
import math
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.programs.kernels import host
from llmtrain.bench.tune.compiling import StandIn, platform_of
from llmtrain.kernels import operation as operations
from llmtrain.kernels import platform, replay, tuning
from llmtrain.kernels.attention import triton_call
from llmtrain.kernels.launch import Descriptor, Kernel, jit
from llmtrain.kernels.operation import Shape
from llmtrain.kernels.replay import Replayed, Tape
from tests.support.replayed import calls, moved, under

LAUNCHES: list[str] = []


class Compiled(host.Compiled):
    """The benchmark's compiled kernel, whose launches write what they were launched with."""

    packed_metadata = (4, 1, 0)

    def __init__(self, name: str, signature: dict[str, Any], scratch: int = 0):
        self.name, self.signature = name, [str(kind) for kind in signature.values()]
        super().__init__(signature)
        self.run.global_scratch_size = scratch

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


def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that is not there. Memory that is allocated has the same numbers every time."""
    active: Any = StandIn(host.TARGET)
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
    monkeypatch.setattr(replay, "_EMPTY", {"cpu": empty})
    monkeypatch.setattr(replay, "SCRATCH", -1)
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


def outcome(call: Callable[..., Any], args: tuple[Any, ...], shifted: int = 0) -> tuple[list[Any], list[str]]:
    """Results, what became of the arguments, and the launches."""
    given = [moved(one, shifted) for one in args]
    LAUNCHES.clear()
    found = under(call, *given)
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    tensors = [one for one in (*results, *given) if isinstance(one, Tensor)]
    shapes = [(one.dtype, tuple(one.shape), one.stride()) for one in results]
    numbers = [zlib.crc32(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for one in tensors]
    return [shapes, *numbers], list(LAUNCHES)


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


@pytest.mark.parametrize(("name", "shape"), [pytest.param(*one, id=f"{i} {one[0]}") for i, one in enumerate(shapes())])
def test_a_replayed_call_is_the_call(name: str, shape: Shape):
    found = calls(name, shape, "cpu")
    assert found
    for replayed, args in found:
        for shifted in (0, 1):
            wanted = outcome(replayed.launch, args, shifted)
            assert wanted[1]
            for _ in range(3):
                assert outcome(replayed, args, shifted) == wanted
    for replayed, _ in found:
        assert {type(tape) for tape in replayed.tapes.values()} == {Tape}


def write(x, y, n, WIDTH: tl.constexpr):
    pass


@pytest.fixture(scope="module")
def kernel() -> Any:
    return jit(write)


def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).to(dtype).view(shape)


def test_formats_are_told_apart(kernel: Any):
    """Each is a call of its own, the second of which is recorded."""

    def launch(x: Tensor, factor: float) -> Tensor:
        y = torch.empty_like(x)
        kernel[(x.shape[0],)](x, y, x.stride(0), WIDTH=x.shape[1])
        return y

    replayed = Replayed(launch)
    wide = of(4, 12)
    given = [(x, 0) for x in (wide, wide.bfloat16(), wide[:2], wide[:, :6], wide.t(), of(8, 6))]
    for x, shifted in (*given, (wide, 1), (wide, 2)):
        for factor in (1.0, 2.0):
            before = len(replayed.tapes)
            for _ in range(3):
                assert outcome(replayed, (x, factor), shifted) == outcome(launch, (x, factor), shifted)
            assert len(replayed.tapes) == before + 1
    assert all(isinstance(tape, Tape) for tape in replayed.tapes.values())


def test_tensors_that_share_memory_are_known_apart(kernel: Any):
    """A call with slices of one tensor, replayed with tensors of their own."""

    def launch(x: Tensor, y: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        kernel[(1,)](x, out, 3, WIDTH=1)
        kernel[(2,)](y, out, 3, WIDTH=1)
        return out

    replayed, both = Replayed(launch), of(2, 16)
    for _ in range(2):
        replayed(both[0], both[1])
    assert outcome(replayed, (of(16), 2 * of(16))) == outcome(launch, (of(16), 2 * of(16)))
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape]


def test_operators_of_pytorch_are_called_again_and_views_followed(kernel: Any):
    def launch(x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.transpose(0, 1).contiguous()
        sums, room = rows.sum(1), torch.zeros(4, 8, dtype=x.dtype)
        head, tail = room.split([2, 6], dim=-1)
        kernel[(3,)](rows[1:], tail, 16, WIDTH=2)
        kernel[(3,)](tail[2:], head, 16, WIDTH=2)
        joined = torch.cat([head, tail], dim=1).unflatten(0, (2, 2))
        kernel[(3,)](joined, sums, 16, WIDTH=2)
        return joined, sums.to(torch.bfloat16), tail[1].view(torch.int32)

    replayed, args = Replayed(launch), (of(6, 4), None)
    wanted = outcome(launch, args)
    for _ in range(4):
        assert outcome(replayed, args) == wanted
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape]


@pytest.mark.parametrize(
    "given",
    [of(6, 4), of(4, 6).t(), of(12, 8)[::2, ::2], of(6, 4).bfloat16()],
    ids=["rows", "columns", "apart", "bf16"],
)
def test_what_is_a_view_or_a_copy_by_its_formats_is_both(given: Tensor, kernel: Any):
    """Beneath autograd PyTorch's mode sees reshape, to and flatten as they are, whose schemas are those of views."""

    def launch(x: Tensor) -> tuple[Tensor, ...]:
        made = [x.reshape(-1), x.flatten(), x.to(torch.float32), x.contiguous(), x.t().reshape(2, -1), x[1:].float()]
        kept = [torch.empty(64, dtype=torch.float32) for _ in made]
        for one, into in zip(made, kept, strict=True):
            kernel[(3,)](one[1:], into, 16, WIDTH=2)
        return (*kept, kept[0].reshape(8, 8).t().reshape(-1)[3:].to(torch.bfloat16))

    replayed = Replayed(launch)
    for shifted in (0, 1, 0):
        wanted = outcome(launch, (given,), shifted)
        for _ in range(4):
            assert outcome(replayed, (given,), shifted) == wanted
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape, Tape]


def test_memory_is_freed_after_its_last_use(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    def launch(x: Tensor) -> Tensor:
        first, second = torch.empty_like(x), torch.empty_like(x)
        kernel[(1,)](x, first, 1, WIDTH=1)
        kernel[(1,)](first, second, 1, WIDTH=1)
        third = torch.empty_like(x)
        kernel[(1,)](second, third, 1, WIDTH=1)
        return third

    replayed, x = Replayed(launch), of(8)
    for _ in range(2):
        replayed(x)
    made, alive = list[weakref.ref[Tensor]](), list[int]()

    def noted(*args: Any) -> Tensor:
        made.append(weakref.ref(tensor := empty(*args)))
        return tensor

    def launched(self: Compiled, *args: Any) -> None:
        alive.append(sum(one() is not None for one in made))

    monkeypatch.setattr(replay, "_EMPTY", {"cpu": noted})
    monkeypatch.setattr(Compiled, "launch", launched)
    replayed.tapes.clear()
    kernel.kept.clear()
    kernel.device_caches.clear()
    for _ in range(3):
        alive.clear()
        replayed(x)
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape]
    assert alive == [2, 2, 2]  # without the first at the last


def test_small_memory_that_kernels_alone_use_is_one_piece(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []

    def launch(x: Tensor) -> Tensor:
        first, second, none, large = (torch.empty(n) for n in (3, 65, 0, 1000))
        for one in (first, second, large):
            kernel[(1,)](x, one, 1, WIDTH=1)
            kernel[(1,)](one, none, 1, WIDTH=1)
        kernel[(1,)](large, first, 1, WIDTH=1)
        kernel[(1,)](first, y := torch.empty_like(x), 1, WIDTH=1)
        kernel[(1,)](second, y, 1, WIDTH=1)
        return y

    def noted(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory with the numbers that PyTorch fills matrices of float32 with."""
        made.append(nbytes := math.prod(size) * dtype.itemsize)
        return torch.full((nbytes // 4,), math.nan).view(dtype).as_strided(size, strides)

    monkeypatch.setattr(replay, "SCRATCH", 999)
    monkeypatch.setattr(replay, "_EMPTY", {"cpu": noted})
    replayed, wanted = Replayed(launch), outcome(launch, (of(4),))
    for _ in range(3):
        assert outcome(replayed, (of(4),)) == wanted
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape]
    assert sorted(made) == [16, 256 + 512, 4000]


Unrecordable = Callable[[Tensor, Any], Any]


def _random(x: Tensor, kernel: Any) -> Tensor:
    y = torch.rand_like(x)
    kernel[(1,)](x, y, 1, WIDTH=1)
    return x.clone()


def _reads_a_number(x: Tensor, kernel: Any) -> Tensor:
    y = torch.empty_like(x)
    kernel[(1,)](x, y, int(x.sum().item()) // 4, WIDTH=1)
    return y


def _returns_an_input(x: Tensor, kernel: Any) -> Tensor:
    kernel[(1,)](x, torch.empty_like(x), 1, WIDTH=1)
    return x.view(-1)


def _without_a_kernel(x: Tensor, kernel: Any) -> Tensor:
    return x + 1


OUTSIDE = torch.zeros(64)


def _reads_a_tensor_of_elsewhere(x: Tensor, kernel: Any) -> Tensor:
    y = torch.empty_like(x)
    kernel[(1,)](OUTSIDE, y, 1, WIDTH=1)
    return y


def _returns_wider_numbers(x: Tensor, kernel: Any) -> Tensor:
    y = torch.empty_like(x)
    kernel[(1,)](x, y, 1, WIDTH=1)
    return y.view(torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        _random, _reads_a_number, _returns_an_input, _without_a_kernel, _reads_a_tensor_of_elsewhere, _returns_wider_numbers
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_called_every_time(function: Unrecordable, kernel: Any):
    ran: list[int] = []

    def launch(x: Tensor) -> Tensor:
        ran.append(1)
        return function(x, kernel)

    replayed = Replayed(launch)
    for number in range(1, 5):
        replayed(of(4, 4))
        assert len(ran) == number
    assert list(replayed.tapes.values()) == [True]


def test_scratch_memory_of_tritons_launcher_is_tritons(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    def scratching(self: Any, key: str, signature: Any, *rest: Any) -> Compiled:
        made = self.device_caches[0][0][key] = Compiled(key, signature, scratch=16)
        return made

    monkeypatch.setattr(JITFunction, "_do_compile", scratching)
    monkeypatch.setattr(nvidia.CudaLauncher, "__call__", lambda self, *args: None)
    mine = jit(write)

    def launch(x: Tensor) -> Tensor:
        mine[(1,)](x, y := torch.empty_like(x), 1, WIDTH=1)
        return y

    replayed = Replayed(launch)
    for _ in range(3):
        replayed(of(4))
    assert list(replayed.tapes.values()) == [True]


def test_hooks_see_launches_and_an_error_leaves_no_tape(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    fails = [False]

    def launch(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernel[(1,)](x, y, 1, WIDTH=1)
        if fails[0]:
            raise ValueError("fails")
        return y

    replayed, x = Replayed(launch), of(4)
    replayed(x)
    fails[0] = True
    with pytest.raises(ValueError, match="fails"):
        replayed(x)
    fails[0] = False
    replayed(x)
    assert [type(tape) for tape in replayed.tapes.values()] == [Tape]
    monkeypatch.setattr(replay, "hooked", lambda: True)
    fails[0] = True
    with pytest.raises(ValueError, match="fails"):
        replayed(x)


def test_tapes_are_bounded_and_forgotten_with_the_rows(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    def launch(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        kernel[(1,)](x, y, 1, WIDTH=1)
        return y

    monkeypatch.setattr(replay, "MAX_TAPES", 2)
    replayed = Replayed(launch)
    kept: list[list[Any]] = []
    for size in (1, 2, 2, 3, 3, 3):
        assert outcome(replayed, (of(size),)) == outcome(launch, (of(size),))
        kept.append([type(tape) for tape in replayed.tapes.values()])
    assert kept == [[bool], [bool, bool], [bool, Tape], [bool], [Tape], [Tape]]
    tuning.forget()
    assert not replayed.tapes


def test_tensor_maps_are_kept_by_address_and_bounded(kernel: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay, "MAX_MAPS", 2)
    mine = jit(write)

    def launch(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        mine[(1,)](Descriptor(x, [4, 16], [16, 1], [4, 16]), y, 1, WIDTH=1)
        return y

    replayed, given = Replayed(launch), [moved(n * of(4, 16), 0) for n in (1, 2, 3)]
    wanted = [outcome(launch, (x,)) for x in given]
    for _ in range(3):
        assert [outcome(replayed, (x,)) for x in given] == wanted
    (tape,) = replayed.tapes.values()
    assert isinstance(tape, Tape)
    (maps,) = next(step for step in tape.steps if isinstance(step, replay.Launch)).maps
    assert 1 <= len(maps[-1]) <= 2
