"""Operators registered by the short way are PyTorch's in every respect that training needs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.kernels import operators
from llmtrain.kernels.operators import call, operator, register_autograd

CALLS: list[str] = []


def scaled(x: Tensor, bias: Tensor | None, factor: float, options: str) -> tuple[Tensor, Tensor]:
    CALLS.append(options)
    out = x * factor if bias is None else x * factor + bias
    return out, x.new_empty(0)


@pytest.fixture(scope="module")
def op() -> Iterator[Any]:
    """x * factor + bias."""
    made = operator("test_scaled", scaled)

    @torch.library.register_fake(made)
    def _(x, bias, factor, options):
        return x.new_empty(x.shape), x.new_empty(0)

    def setup_context(ctx, inputs, output):
        _, bias, ctx.factor, _ = inputs
        ctx.biased = bias is not None

    def backward(ctx, d_out, _):
        return d_out * ctx.factor, d_out if ctx.biased else None, None, None

    register_autograd(made, backward, setup_context)
    yield made
    del operators._GRADIENTS[made]


@pytest.fixture(params=["as PyTorch's", "by the short way"])
def run(request: Any, op: Any) -> Any:
    """A call of the operator."""
    return op if request.param == "as PyTorch's" else partial(call, op)


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same without a gradient."""
    made = operator("test_plain", scaled)
    torch.library.register_fake(made)(lambda x, bias, factor, options: (x.new_empty(x.shape), x.new_empty(0)))
    return made


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def gradient(of: Tensor) -> list[float]:
    assert of.grad is not None
    return of.grad.tolist()


def test_it_holds_to_what_pytorch_asks_of_operators(op: Any):
    assert str(op) == "llmtrain.test_scaled.default"
    for x in (torch.randn(3, 4), leaf(3, 4)):
        for bias in (None, leaf(4), torch.randn(3, 4)):
            torch.library.opcheck(op, (x, None if bias is None else bias.expand(3, 4), 2.0, "text"))


def test_gradients_are_those_of_its_formula_and_only_where_they_are_asked_for(run: Any):
    x, bias = leaf(3), leaf(3)
    out, _ = run(x, bias, 3.0, "")
    out.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert gradient(x) == [3.0, 6.0, 9.0] and gradient(bias) == [1.0, 2.0, 3.0]
    with torch.no_grad():
        assert not run(x, bias, 3.0, "")[0].requires_grad
    assert not run(x.detach(), None, 3.0, "")[0].requires_grad
    assert run(x.detach(), bias, 3.0, "")[0].requires_grad


def test_the_short_way_is_taken_with_and_without_gradients(op: Any, monkeypatch: pytest.MonkeyPatch):
    def dispatched(*args: Any) -> Any:
        raise AssertionError("PyTorch's dispatcher")

    monkeypatch.setattr(operators._GRADIENTS[op], "call", dispatched)
    monkeypatch.setattr(type(op), "__call__", dispatched)
    x = leaf(3)
    call(op, x, None, 3.0, "")[0].sum().backward()
    assert gradient(x) == [3.0] * 3
    with torch.no_grad():
        assert call(op, x, None, 3.0, "")[0].equal(3 * x)


def test_tensors_of_other_classes_go_by_the_dispatcher(op: Any):
    seen: list[Any] = []

    class Noted(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    call(op, torch.randn(3).as_subclass(Noted), None, 2.0, "")
    assert op in seen


def test_an_operator_without_a_gradient_reports_it(plain: Any):
    out, _ = plain(leaf(3), None, 2.0, "")
    with pytest.raises(RuntimeError, match=r"llmtrain\.test_plain\.default has no gradient"):
        out.sum().backward()


def test_modes_and_fake_tensors_come_before_the_kernel(op: Any, run: Any):
    seen: list[Any] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    CALLS.clear()
    with torch.no_grad(), Mode():  # selective checkpointing is one
        run(torch.randn(3), None, 2.0, "seen")
    assert op in seen and CALLS == ["seen"]
    with FakeTensorMode(), torch.no_grad():
        out, _ = run(torch.randn(3), None, 2.0, "fake")
    assert out.shape == (3,) and CALLS == ["seen"]
    with torch.no_grad():
        out, _ = run(torch.randn(3, device="meta"), None, 2.0, "meta")
    assert out.is_meta and CALLS == ["seen"]


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_without_breaks_it_computes_the_same(run: Any, grad: bool):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def twice(x: Tensor, bias: Tensor) -> Tensor:
        return run(run(x, bias, 2.0, "one")[0] + 1, None, 3.0, "two")[0]

    x, bias = leaf(5), leaf(5)
    with torch.set_grad_enabled(grad):
        out = twice(x, bias)
    torch.testing.assert_close(out, (x * 2 + bias + 1) * 3)
    if grad:
        out.sum().backward()
        assert gradient(x) == [6.0] * 5 and gradient(bias) == [3.0] * 5


def test_default_values_are_refused():
    def with_default(x: Tensor, factor: float = 1.0) -> Tensor:
        return x * factor

    with pytest.raises(AssertionError):
        operator("test_with_default", with_default)
