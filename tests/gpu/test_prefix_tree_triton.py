"""The convolution and the scan of packed requests that share prefixes, on a GPU, against fp64 and one text at a time."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.kernels.conv1d.prefix_tree import predecessors
from llmtrain.kernels.conv1d.prefix_tree_triton import prefix_tree_conv
from llmtrain.kernels.ssd.prefix_tree import scan_schedule
from llmtrain.kernels.ssd.prefix_tree_triton import launch_for, prefix_tree_scan
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.support import prefix_trees as trees

pytestmark = pytest.mark.gpu
SHAPES = {
    "prompts": trees.prompts(1, 150, documents=8),
    "more behind a segment than one program takes": trees.crowd(200, 7),
    "texts alone": trees.Shape([9] * 40, [()] * 40),
}
# (heads, head_dim, d_state, groups)
SIZES = [(64, 64, 64, 1), (80, 64, 128, 1), (8, 80, 16, 2), (4, 128, 256, 1)]
LIMIT = {torch.bfloat16: 6e-3, torch.float32: 1e-5}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square, relative."""
    found = found.double().cpu()
    assert found.isfinite().all()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scan(size, name, dtype):
    heads, head_dim, d_state, groups = size
    spec, shape = SSDSpec(heads, head_dim, d_state, groups, 256, dtype=str(dtype).removeprefix("torch.")), SHAPES[name]
    where = platform.detect()
    inputs = trees.scan_inputs(spec, sum(shape.lengths), dtype, "cuda")
    made = scan_schedule(shape.lengths, shape.ancestors, launch_for(spec, where).chunk_size).to(torch.device("cuda"))
    y = prefix_tree_scan(**inputs, schedule=made, spec=spec, platform=where)
    assert error(y[0], trees.expected_scan(spec, shape, inputs)) < LIMIT[dtype]
    assert torch.equal(y, prefix_tree_scan(**inputs, schedule=made, spec=spec, platform=where))


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_convolution(dtype):
    shape = SHAPES["prompts"]
    x = torch.randn(1, sum(shape.lengths), 4224 + 64, device="cuda").to(dtype)[..., 64:]
    weight, bias = torch.randn(4224, 4, device="cuda").to(dtype), torch.randn(4224, device="cuda").to(dtype)
    before = predecessors(shape.lengths, shape.ancestors, 3).cuda()
    y = prefix_tree_conv(x, weight, bias, before, platform.detect().vendor)
    assert error(y[0], trees.expected_convolution(shape, x, weight, bias)) < LIMIT[dtype]
