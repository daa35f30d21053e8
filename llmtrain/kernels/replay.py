"""Calls of an operator, recorded once and replayed: what it launches depends on its arguments' formats, not on their numbers.

An operator of ours works out tiles, grids, strides and descriptors at every call, which takes the host longer than small kernels
take the GPU. For one set of formats (dtype, shape, strides and alignment of tensors; values of all else) all of it is the same
every time. So a call is recorded: the memory that it allocates, the kernels and PyTorch's operators that it launches, with each
tensor as an offset within an input or an allocation. Later calls do only that: allocate, add offsets, launch.

A call is recorded when its formats are seen for the second time. What cannot be recorded is called as ever: launches that are not
kept (launch.py: AMD, hooks, Triton's interpreter), random numbers, results within inputs.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime import driver

from llmtrain.kernels import tuning
from llmtrain.kernels.launch import RECORDING, Descriptor, Kept, hooked

MAX_TAPES = 256
"""Formats that an operator keeps tapes by; where there are more it begins anew."""
MAX_MAPS = 64
"""Tensor maps that are kept of one descriptor of one launch."""
SCRATCH, ALIGNED = 1 << 16, 256
"""Bytes up to which memory that kernels alone use is a part of one piece, for as long as the call; multiples of its addresses."""
_EMPTY = {"cuda": guards._empty_strided_cuda, "cpu": guards._empty_strided_cpu}
_PLACE = "_llmtrain_place"
_ALLOCATIONS = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
}
_VARYING = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unrecorded(Exception):
    """A call does what cannot be replayed."""


@dataclass(frozen=True)
class Place:
    """A tensor within an input or an allocation. slot: its number, inputs first; offset: in bytes."""

    slot: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self, memory: Mapping[int, Tensor]) -> Tensor:
        of = memory[self.slot]
        if of.dtype != self.dtype:
            of = of.view(self.dtype)
        if self.offset == 0 and of.shape == self.size and of.stride() == self.strides:
            return of
        return of.as_strided(self.size, self.strides, of.storage_offset() + self.offset // of.element_size())


class Allocation:
    """Memory that a call allocates."""

    def __init__(self, slot: int, of: Tensor):
        self.slot, self.size, self.strides = slot, tuple(of.shape), of.stride()
        self.dtype, self.device, self.slots, self.nbytes = of.dtype, of.device, {slot}, of.untyped_storage().nbytes()


class Operation:
    """A call of an operator of PyTorch. results: the slots of what it returns; none where it writes into its arguments."""

    def __init__(self, function: Any, args: Any, kwargs: Any, results: list[int]):
        self.function, self.args, self.kwargs, self.results = function, args, kwargs, results
        self.slots = {*results, *(one.slot for one in tree_leaves((args, kwargs)) if isinstance(one, Place))}

    def run(self, memory: dict[int, Tensor]) -> list[Tensor]:
        """The results. memory: the slots' tensors."""
        args, kwargs = tree_map_only(Place, lambda one: one.tensor(memory), (self.args, self.kwargs))
        found = self.function(*args, **kwargs)
        return list(found) if isinstance(found, (tuple, list)) else [found]


class Launch:
    """A kernel's launch, by Triton's launcher in C. values: its arguments behind the stream; filled in are `pointers`,
    (index, slot, offset), and `maps`, of descriptors: these and a function of an address to its tensor map."""

    def __init__(self, kept: Kept, grid: tuple[int, ...], args: Sequence[Any], place: Callable[[Tensor], Place]):
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

        launcher, (x, y, z) = kept.run, (*grid, 1, 1)[:3]
        if not isinstance(launcher, CudaLauncher) or launcher.global_scratch_size or launcher.profile_scratch_size:
            raise Unrecorded("memory that Triton's launcher allocates")
        launch = launcher.launch
        # Where there are descriptors, a function of Python around the launcher.
        within = getclosurevars(launch).nonlocals if isfunction(launch) else {}
        self.launch, metas = within.get("launcher", launch), iter(within.get("tensordesc_meta", ()))
        self.grid, self.function = (x, y, z), kept.function
        how = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        self.values: list[Any] = [*how, None, None, kept.metadata, None, None, None]
        self.pointers: list[tuple[int, int, int]] = []
        self.maps: list[tuple[int, int, int, TensorMaps]] = []
        for value in (*args, *kept.rest):
            if isinstance(value, Tensor):
                at = place(value)
                self.pointers.append((len(self.values), at.slot, at.offset))
                self.values.append(None)
            elif isinstance(value, Descriptor):
                at, meta = place(value.base), next(metas, None)
                if meta is None:
                    raise Unrecorded("a descriptor without a tensor map")
                fields = {name: getattr(value, name) for name in ("shape", "strides", "padding")}

                def described(address: int, fields: dict[str, Any] = fields, meta: Any = meta) -> list[Any]:
                    base = SimpleNamespace(data_ptr=lambda: address)
                    return make_tensordesc_arg(SimpleNamespace(base=base, **fields), meta)

                self.maps.append((len(self.values), at.slot, at.offset, TensorMaps(described)))
                self.values += [None, *described(value.base.data_ptr())[1:]]
            else:
                self.values.append(value)
        self.slots = {slot for _, slot, *_ in (*self.pointers, *self.maps)}


class TensorMaps(dict[int, Any]):
    """Tensor maps of one descriptor by address, made when they are asked for."""

    def __init__(self, described: Callable[[int], list[Any]]):
        super().__init__()
        self.described = described

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_MAPS:
            self.clear()
        made = self[address] = self.described(address)[0]
        return made


Step = Allocation | Operation | Launch


class Recording(TorchDispatchMode):
    """Steps of a call. inputs: tensors that it is to be called with in place of its own, so that each is known by itself, also
    where several share memory."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.inputs = [tensor.detach() for tensor in tensors]
        self.steps: list[Step] = []
        self.dtypes: list[torch.dtype] = []
        self.failed: str | None = None
        for tensor in self.inputs:
            self._new(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        try:
            self._note(func, args, kwargs or {}, found)
        except Unrecorded as error:
            self.failed = self.failed or str(error)
        return found

    def launch(self, kept: Kept | None, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """kept: None: a launch that is not kept."""
        try:
            if kept is None:
                raise Unrecorded("a launch that is not kept")
            self.steps.append(Launch(kept, grid, args, self.place))
        except Unrecorded as error:
            self.failed = self.failed or str(error)

    def place(self, tensor: Tensor) -> Place:
        return Place(*self._at(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())

    def seen(self, tensor: Tensor) -> Place:
        """The place of a tensor that PyTorch is to see; kernels see an address alone."""
        at = self.place(tensor)
        if at.dtype.itemsize != self.dtypes[at.slot].itemsize:
            raise Unrecorded("memory as numbers of another width")
        return at

    def tape(self, found: Any) -> "Tape":
        """found: what the call returned. Raises Unrecorded."""
        results = found if isinstance(found, (tuple, list)) else (found,)
        outputs = [self.seen(tensor) for tensor in results]
        for tensor in results:
            delattr(tensor, _PLACE)
        if self.failed or not any(isinstance(step, Launch) for step in self.steps):
            raise Unrecorded(self.failed or "no kernel of ours")
        if any(at.slot < len(self.inputs) for at in outputs):
            raise Unrecorded("a result within an input")
        return Tape(self.steps, len(self.inputs), outputs, results is not found)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], found: Any) -> None:
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if func.namespace != "aten" or _VARYING & set(func.tags) or not all(isinstance(one, Tensor) for one in results):
            raise Unrecorded(str(func))
        alias = func._schema.returns[0].alias_info
        writes = alias is not None and alias.is_write
        # Not by the schema: reshape, to and others view memory or copy it, as formats have it.
        views = [not writes and _shares_memory(one, args[0]) for one in results if args]
        if any(views):
            if not all(views):
                raise Unrecorded(str(func))
            (slot, offset), base = self._at(args[0]), args[0].data_ptr()
            for one in results:
                setattr(one, _PLACE, (slot, offset + one.data_ptr() - base if one.numel() else offset))
        elif func.overloadpacket in _ALLOCATIONS:
            if results[0].is_cuda and results[0].get_device() != torch.cuda.current_device():
                raise Unrecorded("memory of another device")
            self.steps.append(Allocation(self._new(results[0]), results[0]))
        else:
            args, kwargs = tree_map_only(Tensor, self.seen, (args, kwargs))
            slots = [] if writes else [self._new(one) for one in results]
            self.steps.append(Operation(func, args, kwargs, slots))

    def _at(self, tensor: Tensor) -> tuple[int, int]:
        """Slot and offset."""
        at = getattr(tensor, _PLACE, None)
        if at is None:
            raise Unrecorded("a tensor of elsewhere")
        return at

    def _new(self, tensor: Tensor) -> int:
        setattr(tensor, _PLACE, (len(self.dtypes), 0))
        self.dtypes.append(tensor.dtype)
        return len(self.dtypes) - 1


def _shares_memory(result: Tensor, of: Any) -> bool:
    return isinstance(of, Tensor) and result.untyped_storage()._cdata == of.untyped_storage()._cdata


class Tape:
    """A recorded call. inputs: number of them; single: the result is a tensor and no tuple. run: (inputs, their addresses, stream)
    -> results; a function of its own, without a loop over steps, which takes the host half the time."""

    def __init__(self, steps: list[Step], inputs: int, outputs: list[Place], single: bool):
        self.steps, self.outputs = steps, outputs
        self._shape_as_returned(steps)
        self.names: dict[str, Any] = {}
        self.source = "\n    ".join(["def run(inputs, addresses, stream):", *self._lines(inputs, single)])
        exec(compile(self.source, "<tape>", "exec"), self.names)
        self.run: Callable[[list[Tensor], list[int], int], Any] = self.names["run"]

    def _lines(self, inputs: int, single: bool) -> Iterator[str]:
        """The function's body. tN, aN: tensor and address of slot N."""
        steps, returned = self.steps, {at.slot for at in self.outputs}
        seen = returned.union(*(step.slots for step in steps if isinstance(step, Operation)))  # by PyTorch, as tensors
        pointed = set[int]().union(*(step.slots for step in steps if isinstance(step, Launch)))
        for slot in range(inputs):
            if slot in seen:
                yield f"t{slot} = inputs[{slot}]"
            if slot in pointed:
                yield f"a{slot} = addresses[{slot}]"
        scratch = [
            one for one in steps if isinstance(one, Allocation) and one.slot not in seen and one.nbytes <= SCRATCH
        ]
        if scratch:  # in one piece of memory
            offsets = list(itertools.accumulate((-(-one.nbytes // ALIGNED) * ALIGNED for one in scratch), initial=0))
            yield f"scratch = {self._empty((offsets[-1],), (1,), torch.uint8, scratch[0].device)}"
            yield "start = scratch.data_ptr()"
            for one, offset in zip(scratch, offsets, strict=False):
                yield f"a{one.slot} = {f'start + {offset}' if one.nbytes else 0}"
        small = {one.slot for one in scratch}
        last = {slot: step for step in steps for slot in step.slots if slot >= inputs and slot not in returned}
        for step in steps:
            if step in scratch:
                continue
            made: list[int] = []
            if isinstance(step, Allocation):
                yield f"t{step.slot} = {self._empty(step.size, step.strides, step.dtype, step.device)}"
                made = [step.slot]
            elif isinstance(step, Operation):
                used = ", ".join(f"{slot}: t{slot}" for slot in step.slots - {*step.results})
                made = step.results
                found = "".join(f"t{slot}, " for slot in made)
                yield f"{f'{found}= ' if made else ''}{self._name(step.run)}({{{used}}})"
            else:
                yield f"{self._name(step.launch)}({', '.join(self._arguments(step))})"
            for slot in made:
                if slot in pointed:
                    yield f"a{slot} = t{slot}.data_ptr()"
            dead = [slot for slot in step.slots if last.get(slot) is step and slot not in small]
            if dead:
                yield f"{' = '.join(f't{slot}' for slot in dead)} = None"
        found = [self._result(at) for at in self.outputs]
        yield f"return {found[0] if single else f'({chr(44).join(found)},)'}"

    def _name(self, value: Any) -> str:
        """A name of a value within the function."""
        if type(value) in (int, bool, type(None)):
            return repr(value)
        self.names[name := f"v{len(self.names)}"] = value
        return name

    def _empty(self, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> str:
        # What Inductor's code allocates by: on the current device, without a look through the dispatcher.
        return f"{self._name(_EMPTY[device.type])}({size}, {strides}, {self._name(dtype)})"

    def _arguments(self, step: Launch) -> list[str]:
        values = [*map(str, step.grid), "stream", self._name(step.function), *map(self._name, step.values)]
        for index, slot, offset in step.pointers:
            values[5 + index] = f"a{slot} + {offset}" if offset else f"a{slot}"
        for index, slot, offset, maps in step.maps:
            values[5 + index] = f"{self._name(maps)}[a{slot} + {offset}]"
        return values

    def _result(self, at: Place) -> str:
        own = next((one for one in self.steps if isinstance(one, Allocation) and one.slot == at.slot), None)
        if own is not None and at == Place(at.slot, 0, own.dtype, own.size, own.strides):
            return f"t{at.slot}"
        return f"{self._name(at.tensor)}({{{at.slot}: t{at.slot}}})"

    def _shape_as_returned(self, steps: list[Step]) -> None:
        """Allocate results in their own shape, which may be a view of what the call allocated."""
        own = {step.slot: step for step in steps if isinstance(step, Allocation)}
        for at in self.outputs:
            step = own.get(at.slot)
            if step is not None and at.offset == 0 and math.prod(at.size) == math.prod(step.size):
                step.size, step.strides = at.size, at.strides


class Replayed:
    """An operator's launch function, by tapes where there are some. Its arguments are tensors, numbers and texts."""

    def __init__(self, launch: Callable[..., Any]):
        self.launch = launch
        self.tapes: dict[tuple[Any, ...], Tape | bool] = {}
        """By formats; False: seen once; True: cannot be recorded."""
        tuning.BY_ROWS.append(self.tapes)

    def __call__(self, *args: Any) -> Any:
        if RECORDING.get() is not None or hooked():
            return self.launch(*args)
        device = driver.active.get_current_device()
        key: list[Any] = [device]
        tensors, addresses = list[Tensor](), list[int]()
        for argument in args:
            kind = type(argument)
            if kind is Tensor or kind is Parameter:
                address = argument.data_ptr()
                tensors.append(argument)
                addresses.append(address)
                key += (argument.dtype, argument.shape, argument.stride(), address & 15, argument.get_device())
            elif isinstance(argument, Tensor):
                return self.launch(*args)
            else:
                key.append(argument)
        formats = tuple(key)
        tape = self.tapes.get(formats)
        if isinstance(tape, Tape):
            return tape.run(tensors, addresses, driver.active.get_current_stream(device))
        if tape is None:
            if len(self.tapes) >= MAX_TAPES:
                self.tapes.clear()
            self.tapes[formats] = False
        return self._record(formats, tensors, args) if tape is False else self.launch(*args)

    def _record(self, formats: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...]) -> Any:
        recording = Recording(tensors)
        inputs = iter(recording.inputs)
        before = RECORDING.set(recording)
        try:
            with recording:
                found = self.launch(*(next(inputs) if isinstance(one, Tensor) else one for one in args))
        finally:
            RECORDING.reset(before)
        try:
            self.tapes[formats] = recording.tape(found)
        except Unrecorded:
            self.tapes[formats] = True
        return found
