"""The Triton kernels of both delta rules on a GPU: right to the rounding of their inputs' dtype, and the same every time."""

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform
from llmtrain.kernels.gated_delta.reference import ReferenceGatedDelta
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.triton import build as gated_delta
from llmtrain.kernels.kimi_delta.reference import ReferenceKimiDelta
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.kimi_delta.triton import build as kimi_delta
from llmtrain.models.mixers.gated_deltanet_segments import SegmentRule, with_transition
from llmtrain.models.segments import ContextParallelRanks
from tests.support import kernels as support

pytestmark = pytest.mark.gpu

# Heads, key heads, channels of keys and values; batch, tokens; documents, a state; largest beta.
CASES = {
    "64": ((4, 4, 64, 64), (2, 300), False, True, 1.0),
    "128, documents, shared keys": ((4, 2, 128, 128), (2, 517), True, True, 1.0),
    "256, negative eigenvalues": ((4, 2, 256, 256), (1, 500), True, True, 2.0),
    "loads too narrow for asynchronous copies": ((4, 2, 100, 72), (2, 200), False, True, 1.0),
    "odd, documents": ((3, 1, 40, 20), (2, 333), True, True, 1.0),
    "more values than keys": ((2, 2, 192, 384), (1, 256), False, True, 1.0),
    "many chunks": ((2, 1, 128, 128), (1, 4096), False, False, 1.0),
    "less than a chunk": ((2, 2, 128, 128), (2, 63), False, True, 2.0),
}
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}
"""Largest relative error in the norm: an H200 gave up to 3.5e-3 and 4.3e-4."""


RULES = {
    "gated_delta": (GatedDeltaSpec, ReferenceGatedDelta, gated_delta),
    "kimi_delta": (KimiDeltaSpec, ReferenceKimiDelta, kimi_delta),
}
ALL = [
    (rule, case) for rule in RULES for case, (sizes, *_) in CASES.items() if rule == "gated_delta" or sizes[2] <= 128
]


def inputs(spec: GatedDeltaSpec, batch: int, seq_len: int, most: float) -> list[Tensor]:
    name = "kimi_delta" if isinstance(spec, KimiDeltaSpec) else "gated_delta"
    return support.inputs(name, spec, batch, seq_len, "cuda", most=most)


def outcome(rule, tensors: list[Tensor], state: Tensor | None, ids: Tensor | None, exact: bool = False) -> list[Tensor]:
    """y, the last state, and every gradient; exact: in float64."""
    return support.outcome(lambda *t: rule(*t, ids), [*tensors, state], torch.float64 if exact else None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rule", "case"), ALL)
def test_outputs_and_gradients_are_the_references(rule, case, dtype):
    specification, reference, build = RULES[rule]
    sizes, (batch, seq_len), packed, with_state, most = CASES[case]
    spec = specification(*sizes, str(dtype).removeprefix("torch."))
    tensors = inputs(spec, batch, seq_len, most)
    g = torch.Generator("cuda").manual_seed(2)
    state = torch.randn(batch, sizes[0], *sizes[2:], generator=g, device="cuda") if with_state else None
    ids = (torch.rand(batch, seq_len, generator=g, device="cuda") < 0.02).long().cumsum(1) if packed else None
    kernel = build(spec, platform.detect(), "")
    found, again = (outcome(kernel, tensors, state, ids) for _ in range(2))
    expected = outcome(reference(spec), tensors, state, ids, exact=True)
    names = ("y", "state", "dq", "dk", "dv", "d_log_decay", "d_beta", "d_state")[: len(found)]
    for name, one, other, value in zip(names, found, again, expected, strict=True):
        assert torch.equal(one, other), name
        assert (one.double() - value).norm() < TOLERANCE[dtype] * value.norm(), name


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("case", ["64", "128, documents, shared keys", "many chunks"])
def test_a_state_passes_from_one_segment_to_the_next(monkeypatch, case, packed):
    """A rank alone has both segments of each sequence, and gathers nothing."""
    sizes, (batch, seq_len), _, _, most = CASES[case]
    spec, seq_len = GatedDeltaSpec(*sizes, "bfloat16"), seq_len - seq_len % 2
    tensors = inputs(spec, batch, seq_len, most)
    g = torch.Generator("cuda").manual_seed(2)
    ids = (torch.rand(batch, seq_len, generator=g, device="cuda") < 0.01).long().cumsum(1) if packed else None
    monkeypatch.setattr(ContextParallelRanks, "gather", lambda self, own: own)
    kernel = gated_delta(with_transition(spec), platform.detect(), "")
    rule = SegmentRule.of(ContextParallelRanks(0, 1), seq_len, torch.device("cuda"), ids, 4, kernel)
    dy = torch.randn(tensors[2].shape, generator=g, device="cuda").bfloat16()

    def gradients(rule, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        y = rule(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    found = gradients(lambda *t: rule.apply(None, *t), tensors, dy)
    reference = ReferenceGatedDelta(spec)
    whole = gradients(lambda *t: reference(*t, document_ids=ids)[0], [t.double() for t in tensors], dy.double())
    for name, one, value in zip(("y", "dq", "dk", "dv", "d_log_decay", "d_beta"), found, whole, strict=True):
        assert (one.double() - value).norm() < 2 * TOLERANCE[torch.bfloat16] * value.norm(), name
