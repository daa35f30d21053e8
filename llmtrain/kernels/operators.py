"""Registration of our operators with PyTorch, by the short way through its dispatcher.

As torch.library.custom_op, for operators without keyword-only arguments and defaults, whose results are new memory: a call takes
the host a third of the time, since what custom_op checks and looks up at every call is known here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter

from llmtrain.kernels.launch import is_kept
from llmtrain.kernels.replay import Replayed

_LIBRARY = torch.library.Library("llmtrain", "FRAGMENT")
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
LAUNCHED_ON = {torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU}
"""Devices on which operators launch kernels, not their fake implementations."""
_PLAIN = {Tensor, Parameter, type(None), bool, int, float, str}


def operator(
    name: str, launch: Callable[..., Any], schema: str | None = None, replayed: bool = False
) -> OpOverload:  # fmt: skip
    """The operator llmtrain::NAME, computed by `launch`, on every device. Its fake implementation: torch.library.register_fake.

    schema: of arguments and results; None: from the annotations of `launch`, which takes them by position. replayed: what `launch`
    does is recorded and replayed (replay.py): all kernels that it launches are of launch.jit, whatever numbers tensors have.
    """
    _LIBRARY.define(
        name + (schema or torch.library.infer_schema(launch, mutates_args=())), tags=(torch.Tag.pt2_compliant_tag,)
    )
    op = getattr(torch.ops.llmtrain, name).default
    assert not any(argument.has_default_value() or argument.kwarg_only for argument in op._schema.arguments)
    launch = Replayed(launch) if replayed and is_kept() else launch
    _LIBRARY.impl(name, launch, "CompositeExplicitAutograd")
    gradient = _GRADIENTS[op] = _Gradient(op, launch)
    _LIBRARY.impl(name, gradient.call, "Autograd", with_keyset=True)
    return op


def register_autograd(op: OpOverload, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """The gradient of an operator of `operator`. Arguments as of torch.library.register_autograd."""
    gradient = _GRADIENTS[op]
    gradient.backward, gradient.setup_context = backward, setup_context


def call(op: OpOverload, *args: Any) -> Any:
    """op(*args), of `operator`. Eagerly without PyTorch's dispatcher, which takes the host as long as small kernels do, where
    none but autograd and the operator's own kernel would see the call."""
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, args)) or args[0].is_meta:
        return op(*args)
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return op(*args)
    gradient = _GRADIENTS[op]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        return gradient.apply_in_c(*args, None)
    return gradient.below(None, *args)


class _Gradient:
    """An operator's kernel for autograd. backward: None if it has no gradient."""

    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None

    def __init__(self, op: OpOverload, launch: Callable[..., Any]):
        self.op, self.launch = op, launch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                """args: the operator's, and the dispatcher's keys."""
                *inputs, keys = args
                output = self.below(keys, *inputs)
                if self.setup_context is not None:
                    self.setup_context(ctx=ctx, inputs=tuple(inputs), output=output)
                return output

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                if self.backward is None:
                    raise RuntimeError(f"{op} has no gradient")
                found = self.backward(ctx, *gradients)
                return (*found, None) if isinstance(found, tuple) else (found, None)

        Function.__name__ = Function.__qualname__ = f"{op._opname}_backward"
        self.apply = Function.apply
        # What Function.apply comes to where no transform of torch.func is active.
        self.apply_in_c: Any = super(torch.autograd.Function, Function).apply

    def call(self, keys: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            transformed = torch._C._are_functorch_transforms_active()
            return (self.apply if transformed else self.apply_in_c)(*args, keys)
        return self.below(keys, *args)

    def below(self, keys: Any, *args: Any) -> Any:
        """The result, beneath autograd. What may be between autograd and the kernel (keys: not None): fake tensors, tracing, a
        dispatch mode."""
        with torch._C._AutoDispatchBelowAutograd():
            if keys is None or (keys := keys & _BELOW_AUTOGRAD).highestPriorityTypeId() in LAUNCHED_ON:
                return self.launch(*args)
            return self.op.redispatch(keys, *args)


_GRADIENTS: dict[OpOverload, _Gradient] = {}
