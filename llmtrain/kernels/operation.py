"""Operations as tests, doctor, bench and tuning see them: inputs, reference, tolerance, work, backends and tuning space, written
once in each operation's folder, in its operation.py (and search.py, which imports Triton)."""

import abc
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.kernels import platform as platforms
from llmtrain.kernels import registry
from llmtrain.kernels.platform import Platform

TOLERANCE = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-4}
"""Largest relative error, in the norm of a whole tensor, of a kernel in a dtype."""
DOCUMENT = 700
"""Tokens of a document, where sequences are packed."""
LENGTHS = (2048, 4096, 8192)
TOKENS = 16384
"""Lengths that `bench kernels` measures, and tokens of all sequences of a shape."""
SELFTEST_BATCH, SELFTEST_LEN = 2, 192

Output = Tensor | tuple[Tensor, ...]
Function = Callable[..., Output]
"""Function of an operation's leaves."""


@dataclass(frozen=True)
class Shape:
    """An operation at one size. variant: name of what beyond the spec a row of the tuning table is for, or None; options: further
    keywords of `Operation.inputs`."""

    spec: Any
    batch: int
    seq_len: int
    variant: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Plain data, of which `Operation.shape` makes the shape again."""
        return asdict(self)


@dataclass(frozen=True)
class Work:
    """Work of one direction: FLOP of matrix products, and the bytes that a perfect kernel moves."""

    flops: float
    bytes: float


class Operation(abc.ABC):
    """One operation.

    name: in the registry. title: in commands. leaves: names of the inputs; outputs: of what comes out.
    public: backends that ours is compared with. draws: times as many draws of the inputs as elsewhere, for an output of so few
    numbers that its error differs much from draw to draw. slow_reference: not measured on a GPU, where it
    compiles for minutes, or takes much memory.
    """

    name: ClassVar[registry.Operation]
    spec: ClassVar[type]
    leaves: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    public: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[int] = 1
    tuned: ClassVar[bool] = True
    slow_reference: ClassVar[bool] = False

    @property
    def title(self) -> str:
        return self.name

    @abc.abstractmethod
    def inputs(
        self, spec: Any, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, **options: Any
    ) -> tuple[list[Any], Any]:
        """Tensors as a model gives them to a kernel (None: left out), and the gradients of the outputs, a tensor or a tuple; on the
        device `meta` without memory. The same numbers every time on one kind of device."""

    @abc.abstractmethod
    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Work of the forward and of the backward pass."""

    @abc.abstractmethod
    def label(self, shape: Shape) -> str:
        """Sizes, for a table."""

    @abc.abstractmethod
    def shapes(self, tiny: bool) -> Iterator[Shape]:
        """Shapes that `bench kernels` measures; tiny: for a CPU, to show that it works."""

    @abc.abstractmethod
    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        """Small shapes for the doctor, with what each of them is, the first of which decoding shares."""

    def option(self, shape: Shape, name: str, default: Any) -> Any:
        return dict(shape.options).get(name, default)

    def ids(self, shape: Shape, device: str) -> Tensor | None:
        """Document ids [batch, T], or None."""
        length = self.option(shape, "document", DOCUMENT)
        return documents(shape.batch, shape.seq_len, device, length) if shape.spec.documents else None

    def draw(self, shape: Shape, device: str = "cpu", seed: int = 0) -> tuple[list[Any], Any]:
        """`inputs` of a shape."""
        return self.inputs(shape.spec, shape.batch, shape.seq_len, device, seed, **dict(shape.options))

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        """Function of `inputs` by a kernel that the registry built."""
        return kernel

    def reference(self, shape: Shape, device: str) -> Function:
        """Readable reference as a function of `inputs`, in their own dtype."""
        return self.bind(self.kernel("reference", shape.spec, platforms.cpu()), shape, device)

    def kernel(self, backend: str, spec: Any, here: Platform) -> Any:
        return registry.resolve(self.name, backend, spec, here).build(spec, here)

    def exact(self, shape: Shape, tensors: Sequence[Any], up: Any) -> Sequence[Tensor]:
        """`pieces` of outputs and gradients in float64."""
        return run_both(self.reference(shape, device_of(tensors)), wide(tensors), wide_up(up))

    def pieces(self, shape: Shape, found: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parts of outputs and gradients that are compared with `exact`."""
        return found

    def tolerance(self, dtype: str) -> float:
        """Largest relative error that counts as right."""
        return TOLERANCE[dtype]

    def names(self, tensors: Sequence[Any]) -> tuple[str, ...]:
        """Names of outputs and gradients."""
        return (*self.outputs, *(f"d{n}" for n, t in zip(self.leaves, tensors, strict=False) if t is not None))

    def backends(self, shape: Shape, here: Platform) -> list[str]:
        """Backends that can serve and are worth measuring here."""
        able = [row.backend for row in registry.table(self.name, shape.spec, here) if row.reason is None]
        slow = self.slow_reference and here.vendor != "cpu"
        return [name for name in able if name != "reference" or not slow]

    def is_public(self, backend: str) -> bool:
        return backend in self.public

    # Tuning: of operations that have rows in the tuning tables.

    def sized(self, **sizes: Any) -> Shape:
        """Shape from the sizes of `bench tune --shape`, which are the keywords of this method, with the defaults of its search."""
        raise UserError(f"nothing to tune in '{self.name}'")

    def of_model(self, spec: Any, batch: int, seq_len: int, documents: bool) -> Shape:
        """Shape of a model's kernel. documents: sequences hold several."""
        return Shape(spec, batch, seq_len)

    def refusal(self, shape: Shape) -> str | None:
        """Reason why no search can serve the shape on any GPU, or None."""
        rows = registry.table(self.name, shape.spec, None)
        return next((row.reason for row in rows if row.backend == "triton"), None)

    def search(self, shape: Shape, device: str, where: Platform) -> Any:
        """Search of launch parameters: the class NAMESearch of the folder's search.py, NAME being that of this class."""
        module = importlib.import_module(f"llmtrain.kernels.{self.name}.search")
        return getattr(module, f"{type(self).__name__}Search")(self, shape, device, where)

    def shape(self, fields: dict[str, Any]) -> Shape:
        """Shape from plain data: of a Shape, or of `sized`. Raises UserError for a name that is none of the sizes."""
        if "spec" in fields:
            options = tuple((name, value) for name, value in fields["options"])
            spec = {name: tuple(v) if isinstance(v, list) else v for name, v in fields["spec"].items()}
            return Shape(self.spec(**spec), fields["batch"], fields["seq_len"], fields["variant"], options)
        known = list(inspect.signature(self.sized).parameters)
        for name in fields.keys() - set(known):
            sizes = [one for one in known if one not in ("dtype", "variant")]
            raise UserError(f"{self.name} has no '{name}'; its cases have {', '.join(sizes)}")
        return self.sized(**fields)


class BySequence(Operation):
    """An operation along sequences whose exact result takes much memory: it is made sequence by sequence, and what is compared
    is the last sequence of tensors that have tokens, and vectors (whose gradients are sums over sequences) whole."""

    def exact(self, shape: Shape, tensors: Sequence[Any], up: Tensor) -> list[Tensor]:
        reference, found = self.reference(replace(shape, batch=1), device_of(tensors)), list[Tensor]()
        for i in range(len(up)):
            pieces = wide([t[i : i + 1] if t is not None and t.ndim >= 3 else t for t in tensors])
            new = run_both(reference, pieces, up[i : i + 1].double())
            found = [b if b.ndim >= 3 else a + b for a, b in zip(found or map(torch.zeros_like, new), new, strict=True)]
        return found

    def pieces(self, shape: Shape, found: Sequence[Tensor]) -> list[Tensor]:
        return [t[-1:] if t.ndim >= 3 else t for t in found]


class Draw:
    """Random tensors in `dtype`, the same every time on one kind of device; without memory on the device `meta`."""

    def __init__(self, device: str, dtype: str, seed: int = 0):
        self.device, self.dtype = device, getattr(torch, dtype)
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return self.wide(*shape).to(self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def slice(self, *shape: int) -> Tensor:
        """Slice of a projection more than twice as wide, as a mixer's parts are; rows start at multiples of 16 bytes."""
        *leading, width = shape
        return self(*leading, 2 * width + 128)[..., width - width % 8 : -128 - width % 8]


def documents(batch: int, seq_len: int, device: str | torch.device, length: int = DOCUMENT) -> Tensor:
    """Ids [batch, seq_len] of documents of `length` tokens."""
    return (torch.arange(seq_len, dtype=torch.int32, device=device) // length).expand(batch, -1).contiguous()


def run_both(function: Function, tensors: Sequence[Any], up: Any) -> tuple[Tensor, ...]:
    """Output, or outputs, and the gradients of the tensors that are not None."""
    y = function(*tensors)
    outputs = y if isinstance(y, tuple) else (y,)
    leaves = [t for t in tensors if t is not None]
    return (*(t.detach() for t in outputs), *torch.autograd.grad(y, leaves, up))


def leaves(tensors: Sequence[Any]) -> list[Any]:
    return [None if t is None else t.detach().requires_grad_() for t in tensors]


def wide(tensors: Sequence[Any]) -> list[Any]:
    """Leaves in float64."""
    return leaves([None if t is None else t.detach().double() for t in tensors])


def wide_up(up: Any) -> Any:
    return tuple(t.double() for t in up) if isinstance(up, tuple) else up.double()


def device_of(tensors: Sequence[Any]) -> str:
    return next(t for t in tensors if t is not None).device.type


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Relative error in the norm of a whole tensor."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


def element_size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


NAMES = tuple(name for name in registry.OPERATIONS if not name.endswith("_step"))
"""Folders of operations, in the order of the registry; those on one new token have no folder of their own."""


@functools.cache
def operation(name: str) -> Operation:
    """The operation of a folder, or of a module by its dotted name."""
    return importlib.import_module(name if "." in name else f"llmtrain.kernels.{name}.operation").OPERATION


def operations() -> list[Operation]:
    return [operation(name) for name in NAMES]


def tuned(name: str) -> Operation:
    """The operation `name`. Raises UserError for one that is not tuned."""
    known = [one.name for one in operations() if one.tuned]
    if name not in known and "." not in name:
        raise UserError(f"nothing to tune in '{name}'; there is {', '.join(known)}")
    return operation(name)


def search(name: str, fields: dict[str, Any], device: str, where: Platform) -> Any:
    """The search of an operation at the shape of plain data. Raises UserError as `tuned` and `Operation.shape` do."""
    one = tuned(name)
    return one.search(one.shape(fields), device, where)
