"""Both forms of the causal convolution against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from llmtrain.kernels import platform, registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec

B, T, CHANNELS = 2, 11, 6


def definition(x, weight, bias):
    width = weight.shape[1]
    rows = []
    for t in range(T):
        taps = [weight[:, k] * x[:, t - width + 1 + k] for k in range(width) if t - width + 1 + k >= 0]
        rows.append(sum(taps) + (0 if bias is None else bias))
    return F.silu(torch.stack(rows, 1))


@pytest.mark.parametrize("name", ["reference", "aten"])
@pytest.mark.parametrize("width, biased", [(4, True), (4, False), (1, True), (3, True)])
def test_backends_follow_the_definition(name, width, biased):
    spec = Conv1dSpec(CHANNELS, width)
    kernel = registry.resolve("conv1d", name, spec, platform.cpu()).build(spec, platform.cpu())
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=g, dtype=torch.float64) for s in [(B, T, CHANNELS), (CHANNELS, width)]]
    if biased:
        tensors.append(torch.randn(CHANNELS, generator=g, dtype=torch.float64))
    upstream = torch.randn(B, T, CHANNELS, generator=g, dtype=torch.float64)

    def outcome(function, dtype):
        ins = [t.to(dtype).requires_grad_() for t in tensors]
        y = function(*ins, *([] if biased else [None]))
        return [y.detach(), *torch.autograd.grad(y, ins, upstream.to(dtype))]

    for a, b in zip(outcome(kernel, torch.float32), outcome(definition, torch.float64), strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_taps_do_not_reach_into_another_document():
    kernel = registry.resolve("conv1d", "reference", Conv1dSpec(CHANNELS, 4), platform.cpu()).build(
        Conv1dSpec(CHANNELS, 4), platform.cpu()
    )
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=g, dtype=torch.float64) for s in [(B, T, CHANNELS), (CHANNELS, 4)])
    lengths = (5, 1, 2, 3)
    ids = torch.cat([torch.full((B, n), i) for i, n in enumerate(lengths)], 1)
    expected = torch.cat([kernel(piece, weight, None) for piece in x.split(lengths, 1)], 1)
    torch.testing.assert_close(kernel(x, weight, None, ids), expected)
