"""The gradient of gated units as it is compiled, and within a compiled MLP."""

from typing import Any

import pytest
import torch

from llmtrain.kernels.glu import reference
from llmtrain.kernels.glu.triton import glu_bwd
from llmtrain.kernels.platform import detect
from llmtrain.models.feed_forward.dense import MLP
from llmtrain.models.sections.dense import MLPSection

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
def test_a_compiled_mlp_is_as_exact_as_plain_pytorch(kind):
    config = MLPSection(type=kind, d_ff=512, bias=True)
    ours, plain = (MLP(config, 128, where).cuda().bfloat16() for where in (detect(), None))
    assert ours.glu is not None and plain.glu is None
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    plain.load_state_dict(ours.state_dict())
    exact = MLP(config, 128).cuda().double()
    exact.load_state_dict(plain.state_dict())
    x, dy = (torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def gradients(mlp: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.to(dtype).requires_grad_()
        y = mlp(leaf)
        return [t.double() for t in (y.detach(), *torch.autograd.grad(y, [leaf, *mlp.parameters()], dy.to(dtype)))]

    wanted = gradients(exact, torch.float64)
    found = gradients(torch.compile(ours, fullgraph=True), torch.bfloat16)
    for mine, other, right in zip(found, gradients(plain, torch.bfloat16), wanted, strict=True):
        mine_error, other_error = ((t - right).norm() / right.norm() for t in (mine, other))
        assert mine_error < 1.1 * other_error + 1e-3
