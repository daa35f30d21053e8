"""Launches of Triton kernels that take the host few microseconds.

Triton looks at every argument of every launch anew (its type, whether a pointer is aligned to 16 bytes, whether a number is 1 or a
multiple of 16), since the machine code may depend on it, and builds a text by which it finds the compiled kernel. A kernel of `jit`
here keeps what it found, by a tuple of the same facts, and calls the compiled kernel at once. On AMD, under Triton's interpreter,
with hooks, and for arguments that are neither tensors, numbers nor our tensor descriptors, a launch is Triton's own.
"""

import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_INT32 = 1 << 31
HOW = "LLMTRAIN_LAUNCH"
"""Environment variable. triton: every launch is Triton's own, to compare with."""
MAX_KEPT = 256
"""Launches that a kernel keeps; those of other arguments are Triton's own. A run needs a few."""

COMPILE: list[Callable[[str, Callable[[], Any]], Any]] = []
"""At most one function, by which a kernel that this process does not have yet is compiled: (the kernel's name with the kinds of its
arguments, Triton's compilation) -> the kernel; None: it is not launched."""

RECORDING: ContextVar[Any] = ContextVar("recording", default=None)
"""What notes the launches of this thread: a replay.Recording."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. triton.cdiv takes the host several microseconds."""
    return -(-a // b)


@functools.cache
def next_power_of_2(n: int) -> int:
    return triton.next_power_of_2(n)


def jit(function: Callable[..., Any]) -> JITFunction[Any]:
    """triton.jit for a kernel that is launched."""
    return Kernel(function) if is_kept() else cast("JITFunction[Any]", triton.jit(function))


def is_kept() -> bool:
    """False where every launch is Triton's own."""
    return not knobs.runtime.interpret and os.environ.get(HOW) != "triton"


class Descriptor(TensorDescriptor):
    """A tensor descriptor of a matrix whose alignment the caller has looked at: TensorDescriptor checks all of it again."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base, self.shape, self.strides, self.block_shape, self.padding = base, shape, strides, block_shape, "zero"
        self.kind = (base.dtype, *block_shape)


class Kept(NamedTuple):
    """A compiled kernel. rest: arguments that the caller does not give by position, in the kernel's order."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    rest: tuple[Any, ...]


class Kernel(JITFunction[Any]):
    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        self.kept: dict[tuple[Any, ...], Kept] = {}
        self.constants_at = [at for at, parameter in enumerate(self.params) if parameter.is_constexpr]

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        """A launch on the current stream. args: all that are no constants, by position, and numbers of the constants behind them.
        constants: the others, and Triton's launch options."""
        recording = RECORDING.get()
        if self.pre_run_hooks or hooked():
            if recording is not None:
                recording.launch(None, grid, args)
            return self.run(*args, grid=grid, warmup=False, **constants)
        device = driver.active.get_current_device()
        key, values = _read(device, args, self.constants_at, constants)
        kept = None if key is None else self.kept.get(key)
        if kept is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            if key is not None:
                self._keep(key, compiled, len(args), constants)
            if recording is not None:
                recording.launch(None if key is None else self.kept.get(key), grid, args)
            return compiled
        if recording is not None:
            recording.launch(kept, grid, args)
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        kept.run(x, y, z, stream, kept.function, kept.metadata, None, None, None, *values, *kept.rest)
        return None

    def _do_compile(self, key: str, *request: Any) -> Any:
        def compile_kernel() -> Any:
            return super(Kernel, self)._do_compile(key, *request)

        if not COMPILE:
            return compile_kernel()
        return COMPILE[0](f"{self.__module__}.{self.fn.__qualname__} {key}", compile_kernel)

    def _keep(self, key: tuple[Any, ...], compiled: Any, given: int, constants: dict[str, Any]) -> None:
        """Keep the kernel that Triton has compiled, or had, for launches of the same key."""
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        metadata = getattr(compiled, "metadata", None)
        if metadata is None or metadata.target.backend != "cuda" or len(self.kept) >= MAX_KEPT:
            return
        rest = self.params[given:]
        if not all(p.is_constexpr for p in rest):  # the key has the values of constants alone
            return
        fixed = tuple(constants.get(p.name, p.default) for p in rest)
        self.kept[key] = Kept(compiled.run, compiled.function, compiled.packed_metadata, fixed)


def _read(
    device: int, args: tuple[Any, ...], constants_at: list[int], constants: dict[str, Any]
) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """All that the compiled kernel depends on (None: it may depend on something else), and the arguments as they are launched:
    of tensors the addresses. constants_at: places of constants."""
    values: list[Any] = []
    key: list[Any] = [device, *constants, *constants.values(), *map(type, constants.values())]
    for argument in args:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            address = argument.data_ptr()
            values.append(address)
            aligned = address % 16 == 0 and argument.is_cuda
            key.append(argument.dtype if aligned else (argument.dtype, address % 16 == 0, argument.device.type))
            continue
        values.append(argument)
        if kind is int:
            if argument == 1 or not -_INT32 <= argument < _INT32:
                key.append((argument,))
            else:
                key.append(16 if argument % 16 == 0 else 2)
        elif argument is None or kind is float or kind is bool:
            key.append(kind)
        elif kind is Descriptor:
            key.append(argument.kind)
        else:
            return None, values
    key += [args[at] for at in constants_at if at < len(args)]
    return tuple(key), values


def hooked() -> bool:
    """True if something wants to see every launch, as Triton's profiler does."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of hooks, or one hook; or another function in place of Triton's.
    replaced = JITFunction.run.__module__ != JITFunction.__module__
    return bool(replaced or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
