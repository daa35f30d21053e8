"""The small parts of blocks."""

from typing import Any

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.kernels.platform import Platform
from llmtrain.models.feed_forward.dense import MLP
from llmtrain.models.layers import Norm
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.layers import NormConfig


@pytest.mark.parametrize(
    "mode, expected", [(torch.enable_grad, "kernel"), (torch.no_grad, "plain"), (torch.inference_mode, "plain")]
)
def test_a_norm_runs_its_kernel_in_training_steps_alone(mode, expected):
    norm: Any = Norm(8, NormConfig(type="layernorm", bias=True), platform.cpu(), torch.float32)
    norm.kernel = lambda *given: ("kernel", given)
    norm.plain = lambda *given: ("plain", given)
    x, delta = torch.ones(2, 8), torch.ones(2, 8)
    with mode():
        name, given = norm.add_and_norm(x, delta)
    assert name == expected
    assert [id(t) for t in given] == [id(t) for t in (x, delta, norm.weight, norm.bias)]


def test_a_zero_centered_weight_counts_from_1_and_sees_small_steps_in_bf16():
    """1 + 2^-9 is 1 in bf16, so that the sum is made in fp32."""
    config = NormConfig(zero_centered=True)
    norm = Norm(64, config, platform.cpu(), torch.bfloat16).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.fill_(2.0**-9)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found, y = norm.add_and_norm(x, x)
    wide = 2 * x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.eps) * (1 + 2.0**-9)
    assert found.dtype == y.dtype == torch.bfloat16
    assert torch.equal(y, expected.to(torch.bfloat16))
    y.sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("at_once", [1, 3, 7, 8])
def test_an_mlp_that_reads_a_part_at_a_time_computes_the_same_and_keeps_nothing_of_its_inside(at_once):
    mlp = MLP(MLPSection(type="swiglu", d_ff=64, bias=True), 4).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    found, most = [], []
    for mlp.tokens_at_once in (None, at_once):
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape[-1]) or t, lambda t: t):
            y = mlp(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])))
        most.append(max(kept))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert most == [128, 128 if at_once >= 7 else 4]  # channels of what is kept


@pytest.mark.parametrize(
    ("kind", "vendor", "multiplier", "mode", "ours"),
    [
        ("swiglu", "nvidia", 1.0, torch.enable_grad, True),
        ("geglu", "nvidia", 1.0, torch.enable_grad, True),
        ("swiglu", "nvidia", 1.0, torch.no_grad, False),
        ("swiglu", "nvidia", 0.5, torch.enable_grad, False),
        ("swiglu", "amd", 1.0, torch.enable_grad, False),
        ("gelu", "nvidia", 1.0, torch.enable_grad, False),
    ],
)
def test_gated_units_have_our_gradient_in_training_steps_on_nvidia(kind, vendor, multiplier, mode, ours):
    config = MLPSection(type=kind, d_ff=8, activation_multiplier=multiplier)
    mlp: Any = MLP(config, 4, Platform(vendor, "sm90", "", 1 << 30, 1))
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    with mode():
        y = mlp(torch.randn(1, 3, 4))
    names = set()
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.add(node.name())
            todo += [before for before, _ in node.next_functions]
    assert ("_GLUBackward" in names) == ours
