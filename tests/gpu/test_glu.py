"""The gradient of gated units as it is compiled, and within a compiled MLP."""

from __future__ import annotations

import pytest
import torch

from llmtrain.kernels.glu import reference
from llmtrain.kernels.glu.triton import glu_bwd
from llmtrain.kernels.platform import detect
from llmtrain.models.layers import MLP
from llmtrain.models.sections.layers import MLPConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or detect().vendor != "nvidia", reason="needs a GPU of NVIDIA"),
]
ACTIVATIONS = sorted(reference.ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 7, 40), (2, 1000, 8192), (5, 1101)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.bfloat16, 2.5e-3)])
def test_as_exact_as_its_format(activation, shape, dtype, bound):
    g = torch.Generator("cuda").manual_seed(shape[-1])
    dy = torch.randn(shape, generator=g, device="cuda").to(dtype)
    h = (3 * torch.randn(*shape[:-1], 2 * shape[-1], generator=g, device="cuda")).to(dtype)
    expected = reference.glu_bwd(dy.double(), h.double(), activation)
    found = glu_bwd(dy, h, activation).double()
    assert (found - expected).norm() / expected.norm() < bound


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh"])
def test_a_compiled_mlp_has_the_gradients_of_plain_pytorch(kind):
    config = MLPConfig(type=kind, d_ff=512, bias=True)
    ours, plain = (MLP(128, config, where).cuda().bfloat16() for where in (detect(), None))
    assert ours.glu is not None and plain.glu is None
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    results = []
    for mlp in (torch.compile(ours, fullgraph=True), plain):
        y = mlp(x)
        results.append((y.detach(), *torch.autograd.grad(y.square().mean(), [x, *mlp.parameters()])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=1e-3 * float(other.abs().max()) + 1e-5)
