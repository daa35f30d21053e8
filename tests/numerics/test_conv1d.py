"""Both forms of the causal convolution against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F

from llmtrain.kernels import platform, registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from tests.support import kernels as support

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
    tensors = support.conv_inputs(B, T, CHANNELS, width, biased, torch.float64)
    found = support.outcome(kernel, tensors, torch.float32)
    support.assert_agrees(found, support.outcome(definition, tensors), 1e-5)


def test_taps_do_not_reach_into_another_document():
    kernel = registry.resolve("conv1d", "reference", Conv1dSpec(CHANNELS, 4), platform.cpu()).build(
        Conv1dSpec(CHANNELS, 4), platform.cpu()
    )
    x, weight, _ = support.conv_inputs(B, T, CHANNELS, 4, False, torch.float64)
    lengths = (5, 1, 2, 3)
    ids = support.documents(lengths, B)
    expected = torch.cat([kernel(piece, weight, None) for piece in x.split(lengths, 1)], 1)
    torch.testing.assert_close(kernel(x, weight, None, ids), expected)
