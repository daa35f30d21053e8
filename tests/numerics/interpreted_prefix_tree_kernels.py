"""The convolution and the scan of packed requests that share prefixes; run by test_ssd_triton.py under TRITON_INTERPRET=1."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.kernels.conv1d.prefix_tree import predecessors
from llmtrain.kernels.conv1d.prefix_tree_triton import prefix_tree_conv
from llmtrain.kernels.ssd.prefix_tree import scan_schedule
from llmtrain.kernels.ssd.prefix_tree_triton import prefix_tree_scan
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.support import interpreter
from tests.support import prefix_trees as trees

interpreter.speed_up()
torch.set_num_threads(1)

CHUNK = 16
SPECS = {
    "a state as wide as its head": SSDSpec(2, 16, 16, 1, 64, dtype="float32"),
    "groups, limits, padded sizes": SSDSpec(4, 24, 20, 2, 64, dt_limit=(0.05, 0.2), dtype="float32"),
    "a least step": SSDSpec(2, 8, 8, 1, 64, dt_limit=(0.3, None), dtype="float32"),
    "in tiles of columns": SSDSpec(1, 40, 256, 1, 64, dtype="float32"),
}
SHAPES = {
    "prompts": trees.prompts(0, 40),
    "more behind a segment than one program takes": trees.crowd(30, 5),
    "what is too long for a step": trees.crowd(3, 2 * CHUNK + 3),
    "one token": trees.Shape([1], [()]),
}


CASES = [*(("a state as wide as its head", name) for name in SHAPES), *((name, "prompts") for name in list(SPECS)[1:])]


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_scan(spec, shape):
    spec, shape = SPECS[spec], SHAPES[shape]
    inputs = trees.scan_inputs(spec, sum(shape.lengths), torch.float32)
    y = prefix_tree_scan(
        **inputs, schedule=scan_schedule(shape.lengths, shape.ancestors, CHUNK), spec=spec, platform=platform.cpu()
    )
    torch.testing.assert_close(y[0].double(), trees.expected_scan(spec, shape, inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution(width, with_bias):
    shape = SHAPES["prompts"]
    tokens, channels = sum(shape.lengths), 40
    rng = torch.Generator().manual_seed(width)
    x = torch.randn(1, tokens, channels + 8, generator=rng)[..., 8:]
    weight, bias = torch.randn(channels, width, generator=rng), torch.randn(channels, generator=rng)
    before = predecessors(shape.lengths, shape.ancestors, width - 1)
    y = prefix_tree_conv(x, weight, bias if with_bias else None, before, "nvidia")
    expected = trees.expected_convolution(shape, x, weight, bias if with_bias else None)
    torch.testing.assert_close(y[0].double(), expected, atol=1e-5, rtol=1e-4)
