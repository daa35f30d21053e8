"""The small parts of blocks."""

from typing import Any

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.models.layers import Norm
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
