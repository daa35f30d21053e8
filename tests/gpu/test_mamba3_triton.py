"""The Triton kernels of Mamba-3 on a GPU: right to the rounding of their inputs' dtype, and the same every time."""

import pytest
import torch

from llmtrain.kernels import platform, registry
from llmtrain.kernels.mamba3.reference import ReferenceMamba3
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from tests.support import kernels as support
from tests.support.mamba3 import NAMES, flat, state_of

pytestmark = pytest.mark.gpu

# Heads, head_dim, d_state, groups, angles; batch, tokens; documents, a state.
CASES = {
    "usual sizes": ((8, 64, 128, 1, 32), (2, 1024), False, False),
    "documents, a state, all channels rotate": ((8, 64, 128, 2, 64), (2, 517), True, True),
    "odd sizes": ((3, 40, 20, 1, 5), (2, 333), True, True),
    "wide heads": ((4, 128, 64, 1, 16), (1, 700), False, True),
    "one token": ((4, 64, 128, 1, 32), (3, 1), False, True),
}
TOLERANCE = {torch.bfloat16: 0.01, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_references(case, dtype):
    sizes, (batch, seq_len), packed, with_state = CASES[case]
    spec, here = Mamba3Spec(*sizes, dtype=str(dtype).removeprefix("torch.")), platform.detect()
    tensors = support.inputs("mamba3", spec, batch, seq_len, "cuda", state=with_state)
    g = torch.Generator("cuda").manual_seed(2)
    ids = (torch.rand(batch, seq_len, generator=g, device="cuda") < 0.02).long().cumsum(1) if packed else None
    kernel = flat(registry.resolve("mamba3", "triton", spec, here).build(spec, here), ids)
    found, again = (support.outcome(kernel, tensors) for _ in range(2))
    expected = support.outcome(flat(ReferenceMamba3(64), ids), tensors, torch.float64)
    for name, one, other, value in zip(NAMES, found, again, expected, strict=False):
        assert torch.equal(one, other), name
        assert (one.double() - value).norm() <= TOLERANCE[dtype] * value.norm() + 1e-6, name


@pytest.mark.parametrize("sizes", [(8, 64, 128, 1, 32), (3, 40, 20, 1, 5), (2, 128, 256, 2, 128)], ids=str)
def test_steps_go_on_from_each_others_state(sizes):
    spec, here = Mamba3Spec(*sizes, dtype="bfloat16"), platform.detect()
    *tensors, h, angle, k, v = support.inputs("mamba3", spec, 4, 20, "cuda", state=True)
    steps, states = [], []
    for name, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        step, state = registry.resolve("mamba3_step", name, spec, here).build(spec, here), [h, angle, k, v]
        states.append([t.to(dtype, copy=True) for t in state])
        given = tensors if name == "triton" else [t.double() for t in tensors]
        now = state_of([*given, *states[-1]])
        steps.append([step(*(t[:, i] for t in given[:7]), *given[7:], now) for i in range(20)])
    for one, value in zip(*steps, strict=True):
        assert (one.double() - value).norm() < 0.01 * value.norm()
    for i, (one, value) in enumerate(zip(*states, strict=True)):
        one, value = (t.cos() if i == 1 else t for t in (one.double(), value))
        assert (one - value).norm() < 1e-4 * value.norm()
