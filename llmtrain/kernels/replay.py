"""Calls of an operator, recorded once and replayed: what it launches depends on its arguments' formats, not on their numbers.

An operator of ours works out tiles, grids, strides and descriptors at every call, which takes the host longer than small kernels
take the GPU. For one set of formats (dtype, shape, strides and alignment of tensors; values of all else) all of it is the same
every time. So a call is recorded: the memory that it allocates, the kernels and PyTorch's operators that it launches, with each
tensor as an offset within an input or an allocation. Later calls do only that: allocate, add offsets, launch.

A call is recorded when its formats are seen for the second time. What cannot be recorded is called as ever: launches that are not
kept (launch.py: AMD, hooks, Triton's interpreter), random numbers, results within inputs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getclosurevars, isfunction
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
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

    def tensor(self, memory: Sequence[Any]) -> Tensor:
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
        self.how, self.slots = {"dtype": of.dtype, "device": of.device}, {slot}

    def run(self, memory: list[Any], addresses: list[int], stream: int) -> None:
        made = memory[self.slot] = torch.empty_strided(self.size, self.strides, **self.how)
        addresses[self.slot] = made.data_ptr()


class Operation:
    """A call of an operator of PyTorch. results: the slots of what it returns; none where it writes into its arguments."""

    def __init__(self, function: Any, args: Any, kwargs: Any, results: list[int]):
        self.function, self.args, self.kwargs, self.results = function, args, kwargs, results
        self.slots = {*results, *(one.slot for one in tree_leaves((args, kwargs)) if isinstance(one, Place))}

    def run(self, memory: list[Any], addresses: list[int], stream: int) -> None:
        args, kwargs = tree_map_only(Place, lambda one: one.tensor(memory), (self.args, self.kwargs))
        found = self.function(*args, **kwargs)
        for slot, tensor in zip(self.results, found if isinstance(found, (tuple, list)) else (found,), strict=False):
            memory[slot], addresses[slot] = tensor, tensor.data_ptr()


class Launch:
    """A kernel's launch, by Triton's launcher in C. values: its arguments; filled in are `pointers`, (index, slot, offset), and
    `maps`, of descriptors: these and a function that makes the tensor map of an address, and those that were made."""

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
        self.maps: list[tuple[int, int, int, Callable[[int], Any], dict[int, Any]]] = []
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

                self.maps.append((len(self.values), at.slot, at.offset, described, {}))
                self.values += [None, *described(value.base.data_ptr())[1:]]
            else:
                self.values.append(value)
        self.slots = {slot for _, slot, *_ in (*self.pointers, *self.maps)}

    def run(self, memory: list[Any], addresses: list[int], stream: int) -> None:
        values = self.values.copy()
        for index, slot, offset in self.pointers:
            values[index] = addresses[slot] + offset
        for index, slot, offset, described, made in self.maps:
            address = addresses[slot] + offset
            if address not in made:
                if len(made) >= MAX_MAPS:
                    made.clear()
                made[address] = described(address)[0]
            values[index] = made[address]
        self.launch(*self.grid, stream, self.function, *values)


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
        return Tape(self.steps, len(self.inputs), len(self.dtypes), outputs, results is not found)

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
    """A recorded call. inputs, slots: numbers of them; single: the result is a tensor and no tuple."""

    def __init__(self, steps: list[Step], inputs: int, slots: int, outputs: list[Place], single: bool):
        self.outputs, self.single, self.unknown = outputs, single, slots - inputs
        kept, dead = {*range(inputs), *(at.slot for at in outputs)}, list[tuple[Step, tuple[int, ...]]]()
        for step in reversed(steps):
            dead.append((step, tuple(step.slots - kept)))  # used here for the last time
            kept |= step.slots
        self.steps = dead[::-1]
        self._shape_as_returned(steps)

    def run(self, tensors: list[Tensor], addresses: list[int], stream: int) -> Any:
        memory: list[Any] = [*tensors, *[None] * self.unknown]
        addresses += [0] * self.unknown
        for step, dead in self.steps:
            step.run(memory, addresses, stream)
            for slot in dead:
                memory[slot] = None
        found = tuple([at.tensor(memory) for at in self.outputs])
        return found[0] if self.single else found

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
