"""The list of a model's kernels that `doctor FILE` prints and `bench tune FILE` tunes is that of the model as it is built."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.models.backends import chosen
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.attention import Attention
from llmtrain.models.mixers.mamba2 import Mamba2
from llmtrain.schema.load import load_config


@pytest.mark.parametrize("name", ["zamba2-1.2b", "falcon-h1-0.5b", "gemma3-1b", "nemotron-h-8b", "mpt-125m"])
@pytest.mark.parametrize("documents", [False, True])
def test_the_list_of_kernels_is_that_of_the_model(name, documents):
    config = load_config(name).model
    with torch.device("meta"):
        model = HybridLM(config, platform.cpu(), torch.float32, documents)
    built = set()
    for module in model.modules():
        if isinstance(module, Attention):
            built.add(("attention", module.spec, module.backend.name))
        if isinstance(module, Mamba2):
            built.add(("ssd", module.spec, module.backend.name))
            built.add(("conv1d", module.conv.spec, module.conv.backend.name))
            if hasattr(module.norm, "backend"):
                built.add(("gated_norm", module.whole.gated_norm, module.norm.backend.name))  # pyright: ignore[reportAttributeAccessIssue]
    listed = {
        (one.kernel.operation, one.kernel.spec, one.backend)
        for one in chosen(config, platform.cpu(), "float32", documents)
        if one.kernel.operation not in ("norm", "rotary")
    }
    assert listed == built
