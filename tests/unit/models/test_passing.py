"""Functions that pass an input on, to do something in the backward pass: they do it, and then, also in compiled graphs."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import llmtrain
from llmtrain.models.attached_loss import AttachedLosses, add_in_backward, attach_loss, attach_pooled

POOLED = torch.zeros(3)
LOSSES = AttachedLosses(torch.ones(()), {"balance": torch.zeros(())}, pooled=POOLED)
LOAD = torch.zeros(3)


def attached(x: Tensor, scores: Tensor) -> Tensor:
    x = add_in_backward(x, LOAD, torch.ones(3))
    x = attach_loss(x, scores.square().sum(), LOSSES, "balance")
    return attach_pooled(x, scores, LOSSES, "balance")


def an_input(x, scores):
    return attached(x, scores)


def a_view_of_an_input(x, scores):
    return attached(x, scores).view(2, 3)


def what_is_another_result(x, scores):
    y = 2 * x
    return attached(y, scores), y.view(3, 2)


def what_is_read_further(x, scores):
    return 2 * attached(x, scores) + 1


@pytest.mark.parametrize("ending", [an_input, a_view_of_an_input, what_is_another_result, what_is_read_further])
def test_a_graph_ends_with_losses_and_counts_of_the_backward_pass(ending):
    def step(function: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        x, scores = torch.randn(6, requires_grad=True), torch.randn(3, requires_grad=True)
        LOSSES.reset()
        LOAD.zero_()
        LOSSES.weight.fill_(1)
        POOLED.zero_()
        found = function(1 * x, scores)  # a graph's input that is no leaf
        # Meanwhile as `weigh` sets them, and as other layers add.
        with torch.autograd._unsafe_preserve_version_counter((LOSSES.weight, POOLED)):
            LOSSES.weight.fill_(0.25)
            POOLED.copy_(torch.tensor([1.0, 2.0, 4.0]))
        LOSSES.terms["balance"].add_(8)
        LOAD.add_(16)
        torch.cat([one.flatten() for one in found] if isinstance(found, tuple) else [found.flatten()]).sum().backward()
        return x.grad, scores.grad, LOAD.clone(), LOSSES.terms["balance"].clone()

    torch._dynamo.reset()
    wanted = step(ending)
    assert wanted[2].eq(17).all() and wanted[1].ne(0).all()
    torch.testing.assert_close(step(torch.compile(ending, backend="aot_eager", fullgraph=True)), wanted)


VIEWS = {"view", "view_as", "reshape", "flatten", "unflatten", "t", "transpose", "detach", "alias", "contiguous", "to"}


def passed_by_hand(function: Any) -> list[int]:
    """Lines in which a function returns one of its arguments, or a view of it, itself."""
    arguments = {one.arg for one in function.args.args}
    found = []
    for node in ast.walk(function):
        if not isinstance(node, ast.Return):
            continue
        for one in node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]:
            while isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in VIEWS:
                one = one.func.value
            found += [node.lineno] if isinstance(one, ast.Name) and one.id in arguments else []
    return found


def test_all_functions_pass_their_inputs_on_in_this_way():
    files = sorted(Path(llmtrain.__file__).parent.rglob("*.py"))
    nodes = ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text())))
    classes = [(file, node) for file, node in nodes if isinstance(node, ast.ClassDef) and _is_function(node)]
    forwards = [(file, one) for file, node in classes for one in node.body if getattr(one, "name", "") == "forward"]
    assert len(forwards) > 10
    assert not [(file.name, line) for file, one in forwards for line in passed_by_hand(one)]
    assert passed_by_hand(ast.parse("def forward(ctx, x):\n    return x.view_as(x), None").body[0]) == [2]


def _is_function(node: ast.ClassDef) -> bool:
    return any(ast.unparse(one).endswith("autograd.Function") for one in node.bases)
