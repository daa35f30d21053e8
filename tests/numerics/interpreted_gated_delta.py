"""Cases of test_gated_delta_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from llmtrain.kernels.gated_delta.reference import ReferenceGatedDelta
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.triton import TritonGatedDelta
from llmtrain.kernels.gated_delta.triton_launch import Launch, Tile
from llmtrain.kernels.kimi_delta.reference import ReferenceKimiDelta
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.kimi_delta.triton import TritonKimiDelta
from llmtrain.kernels.kimi_delta.triton_launch import Launch as OfChannels
from llmtrain.kernels.platform import Platform
from llmtrain.models import segments as gathering
from llmtrain.models.mixers.gated_deltanet_segments import SegmentRule
from llmtrain.models.segments import ContextParallelRanks
from tests.support import kernels as support

GPU = Platform("nvidia", "sm90", "", 1 << 36, 132)
TILE = Tile(16, 16, 4, 1)
SMALL = Launch(TILE, TILE, TILE, TILE, TILE, chunk_size=32)
"""Several tiles and chunks in a small problem."""
OF_CHANNELS = OfChannels(**vars(SMALL), chunk_decays=TILE, pair_products=TILE, pair_gradients=TILE)
# heads, key heads, channels of keys and of values; batch, tokens; documents, a state; chunk size; largest beta.
CASES = {
    "whole chunks": ((2, 2, 16, 16), (1, 64), False, False, 32, 1.0),
    "a ragged chunk, odd sizes, shared keys, a state": ((4, 2, 24, 20), (2, 70), False, True, 32, 1.0),
    "documents": ((3, 1, 40, 16), (1, 77), True, False, 32, 1.0),
    "documents and a state": ((2, 1, 20, 36), (2, 45), True, True, 16, 1.0),
    "one block in a chunk of 64, negative eigenvalues": ((2, 1, 16, 24), (1, 100), True, True, 64, 2.0),
    "one token": ((2, 2, 16, 16), (3, 1), False, True, 32, 1.0),
}
ALSO = ("documents and a state", "one block in a chunk of 64, negative eigenvalues", "one token")
"""Cases of kimi_delta too, whose launches are those of the gated delta rule."""


RULES = {
    "gated_delta": (
        GatedDeltaSpec,
        ReferenceGatedDelta,
        lambda chunk: TritonGatedDelta(replace(SMALL, chunk_size=chunk)),
    ),
    "kimi_delta": (
        KimiDeltaSpec,
        ReferenceKimiDelta,
        lambda chunk: TritonKimiDelta(replace(OF_CHANNELS, chunk_size=chunk)),
    ),
}


@pytest.fixture(params=RULES)
def rule(request):
    """Specification, reference and kernel (by the size of its chunks) of either rule."""
    return RULES[request.param]


def inputs(spec: GatedDeltaSpec, batch: int, seq_len: int, most: float) -> list[torch.Tensor]:
    name = "kimi_delta" if isinstance(spec, KimiDeltaSpec) else "gated_delta"
    return support.inputs(name, spec, batch, seq_len, most=most)


def outcomes(rule, tensors, ids=None, state=None, exact: bool = False) -> list[torch.Tensor]:
    """y, the last state, and every gradient; exact: in float64."""
    return support.outcome(lambda *t: rule(*t, ids), [*tensors, state], torch.float64 if exact else None)


def assert_agrees(kernel, reference, tensors, state=None, ids=None, tolerance: float = 3e-6) -> None:
    expected = outcomes(reference, tensors, ids, state, exact=True)
    for found, value in zip(outcomes(kernel, tensors, ids, state), expected, strict=True):
        assert (found.double() - value).norm() < tolerance * value.norm()


def documents(batch: int, seq_len: int) -> torch.Tensor:
    starts = torch.rand(batch, seq_len, generator=torch.Generator().manual_seed(3)) < 0.08
    return starts.long().cumsum(1) + 5


BOTH = [(rule, case) for rule in RULES for case in CASES if rule == "gated_delta" or case in ALSO]


def test_the_gradient_of_decays_errs_less_than_that_of_keys_in_16_bits():
    """Of strong decays, where near pairs of tokens are all that counts."""
    spec = KimiDeltaSpec(1, 1, 32, 32, "float16")
    tensors = support.inputs("kimi_delta", spec, 1, 128)
    tensors[3] = 2 * tensors[3] - 1
    exact = outcomes(ReferenceKimiDelta(spec), tensors, exact=True)
    found = outcomes(TritonKimiDelta(replace(OF_CHANNELS, chunk_size=64)), tensors)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    of_keys, of_decays = errors[3], errors[5]
    assert of_decays < 0.9 * of_keys < 5e-4


@pytest.mark.parametrize(("rule", "case"), BOTH)
def test_outputs_and_gradients_are_the_references(rule, case):
    specification, reference, build = RULES[rule]
    sizes, (batch, seq_len), packed, with_state, chunk, most = CASES[case]
    spec = specification(*sizes, "float32")
    state = torch.randn(batch, sizes[0], *sizes[2:], generator=torch.Generator().manual_seed(2)) if with_state else None
    ids = documents(batch, seq_len) if packed else None
    kernel = build(chunk)
    assert_agrees(kernel, reference(spec), inputs(spec, batch, seq_len, most), state, ids)


def test_slices_of_a_projection_are_read_where_they_lie(rule):
    specification, reference, build = rule
    spec = specification(2, 1, 16, 16, "float32")
    q, k, v, decay, beta = inputs(spec, 2, 40, 1.0)
    joined = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    q, k, v = (t.unflatten(-1, (-1, 16)) for t in joined.split([16, 16, 32], -1))
    assert not v.is_contiguous()
    assert_agrees(build(32), reference(spec), [q, k, v, decay, beta])


def test_equal_keys_without_decay_stay_stable(rule):
    """The worst system: every token rewrites what the one before wrote."""
    specification, reference, build = rule
    spec = specification(1, 1, 16, 16, "float32")
    tensors = inputs(spec, 1, 64, 1.0)
    tensors[1][:] = tensors[1][:, :1].clone()
    tensors[3].zero_()
    tensors[4].fill_(1.9)
    expected, state = reference(spec)(*(t.double() for t in tensors))
    y, final = build(64)(*tensors)
    assert (y.double() - expected).norm() < 1e-4 * expected.norm()
    assert (final.double() - state).norm() < 1e-4 * state.norm()


def test_strong_decay_gives_finite_gradients(rule):
    """Above the diagonal the decay between two tokens would overflow: it must be masked before exp."""
    specification, _, build = rule
    spec = specification(1, 1, 16, 16, "float32")
    tensors = inputs(spec, 1, 70, 1.0)
    tensors[3].fill_(-50.0)
    assert all(torch.isfinite(t).all() and t.abs().max() < 1e3 for t in outcomes(build(32), tensors))


def test_channels_that_forget_at_once_stand_beside_some_that_never_do():
    """Gates of 0, of -20 and below, and of what lies between, in any order: the sums of one chunk have a wide range."""
    spec = KimiDeltaSpec(2, 1, 24, 16, "float32")
    tensors, g = inputs(spec, 1, 70, 2.0), torch.Generator().manual_seed(4)
    gates = torch.tensor([0.0, -1e-3, -0.5, -5.0, -20.0, -90.0, -1e4])
    tensors[3] = gates[torch.randint(len(gates), tensors[3].shape, generator=g)]
    assert_agrees(RULES["kimi_delta"][2](64), ReferenceKimiDelta(spec), tensors, tolerance=1e-4)


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.ci), True])
def test_two_segments_are_the_whole_sequence(packed):
    """Those of a group of one rank, whose values are as many wider as a key has channels."""
    spec, seq_len = GatedDeltaSpec(4, 2, 20, 12, "float32"), 90
    tensors, ids = inputs(spec, 2, seq_len, 2.0), documents(2, seq_len) if packed else None
    rule = SegmentRule.of(ContextParallelRanks(0, 1), seq_len, torch.device("cpu"), ids, 4, TritonGatedDelta(SMALL))
    if packed:
        assert rule.continues is not None and rule.continues[:, 1].any()

    def kernel(q, k, v, decay, beta, initial, ids):
        return rule.apply(None, q, k, v, decay, beta)

    def whole(*given):
        return ReferenceGatedDelta(spec)(*given)[0]

    with patch.object(gathering, "all_gather_tensor_autograd", lambda own, dim, group: own):
        found = outcomes(kernel, tensors, ids)
    for one, value in zip(found, outcomes(whole, tensors, ids, exact=True), strict=True):
        assert (one.double() - value).norm() <= 3e-6 * value.norm()
