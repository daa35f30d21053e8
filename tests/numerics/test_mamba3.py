"""Mamba-3's chunked scan against its recurrence, one token at a time in float64; and what its layer is made of."""

import random

import pytest
import torch
from torch import Tensor

from llmtrain.kernels.mamba3.reference import ReferenceMamba3, rotated
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.mamba3.step import ReferenceMamba3Step
from tests.support import kernels as support
from tests.support.mamba3 import flat, state_of

BATCH, H = 2, 3
SPEC = Mamba3Spec(H, 4, 6, 1, 2, dtype="float32")


def recurrence(q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D, state=None) -> tuple[Tensor, ...]:
    """The authors' step, token by token: h = a h + (1 - l) dt a v' k'^T + l dt v k^T, where k' and v' are the last token's."""
    batch, _, heads, width = v.shape
    zeros = [v.new_zeros(batch, heads, *s) for s in ((width, q.shape[3]), rate.shape[2:], q.shape[3:], (width,))]
    h, angle, last_k, last_v = zeros if state is None else state
    ys, repeats = [], heads // q.shape[2]
    for t in range(v.shape[1]):
        angle = angle + rate[:, t, None] * dt[:, t, :, None]
        q_t, k_t = (
            rotated(x[:, t].repeat_interleave(repeats, 1) + bias, angle) for x, bias in ((q, q_bias), (k, k_bias))
        )
        v_t = v[:, t]
        a, weight, step = (x[:, t, :, None, None] for x in (log_decay.exp(), later, dt))
        h = a * h + (1 - weight) * step * a * last_v[..., None] * last_k[..., None, :]
        h = h + weight * step * v_t[..., None] * k_t[..., None, :]
        ys.append((h @ q_t[..., None])[..., 0] + D[:, None] * v_t)
        last_k, last_v = k_t, v_t
    return torch.stack(ys, 1), h, angle, last_k, last_v


def inputs(seq_len: int, with_state: bool, batch: int = BATCH, spec: Mamba3Spec = SPEC) -> list[Tensor]:
    """Leaves in float64; the four tensors of a state last."""
    drawn = support.inputs("mamba3", spec, batch, seq_len, state=with_state)
    return [t.double().requires_grad_() for t in drawn]


def definition(*tensors):
    y, h, angle, k, v = recurrence(*tensors[:10], state=tensors[10:] or None)
    return y, h, angle.cos(), k, v


def assert_equal(ours, expected, tolerance: float = 1e-10) -> None:
    assert len(ours) == len(expected)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda text, n=i: f"{n}: {text}")


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("chunk, seq_len", [(8, 1), (8, 5), (8, 16), (8, 27), (1, 7), (64, 70)])
def test_chunked_form_equals_the_recurrence(chunk, seq_len, with_state):
    tensors = inputs(seq_len, with_state)
    kernel = ReferenceMamba3(chunk)
    assert_equal(support.outcome(flat(kernel), tensors), support.outcome(definition, tensors))


@pytest.mark.parametrize("case", range(12))
def test_random_lengths_chunks_and_cuts(case):
    """The state continues a sequence, also backwards."""
    rng = random.Random(case)
    length, kernel = rng.randint(2, 50), ReferenceMamba3(rng.randint(1, 20))
    tensors, cut = inputs(length, rng.random() < 0.5), rng.randint(1, length - 1)

    def in_two(*given):
        state = state_of(given)
        first, state = kernel(*(t[:, :cut] for t in given[:7]), *given[7:10], state=state)
        second, state = kernel(*(t[:, cut:] for t in given[:7]), *given[7:10], state=state)
        return torch.cat([first, second], 1), state.h, state.angle.cos(), state.k, state.v

    assert_equal(support.outcome(in_two, tensors), support.outcome(definition, tensors))


@pytest.mark.parametrize("lengths", [(30,), (8, 8, 14), (5, 1, 17, 7), (1,) * 30], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_documents_of_one_sequence_equal_the_documents_apart(lengths, with_state):
    tensors, kernel = inputs(30, with_state), ReferenceMamba3(8)
    ids = torch.cat([torch.full((BATCH, n), i) for i, n in enumerate(lengths)], 1)

    def ours(*given):
        y, state = kernel(*given[:10], state=state_of(given), document_ids=ids)
        return y, state.v

    def apart(*given):
        pieces = zip(*(t.split(lengths, 1) for t in given[:7]), strict=True)
        first = given[10:] or None
        found = [recurrence(*piece, *given[7:10], state=None if i else first) for i, piece in enumerate(pieces)]
        return torch.cat([y for y, *_ in found], 1), found[-1][4]

    assert_equal(support.outcome(ours, tensors), support.outcome(apart, tensors))


@pytest.mark.parametrize("decay", [0.0, -1e-9, -50.0, -1e4])
@pytest.mark.parametrize("later", [0.0, 1.0])
def test_extreme_decays_and_weights(decay, later):
    tensors = [t.detach() for t in inputs(70, True)]
    tensors[3], tensors[5] = torch.full_like(tensors[3], decay), torch.full_like(tensors[5], later)
    tensors = [t.requires_grad_() for t in tensors]
    assert_equal(support.outcome(flat(ReferenceMamba3(16)), tensors), support.outcome(definition, tensors))


@pytest.mark.parametrize("spec", [SPEC, Mamba3Spec(4, 5, 7, 2, 3, dtype="float32")], ids=["one group", "two groups"])
def test_steps_are_the_recurrence(spec):
    """One token after another, into the state's own memory."""
    tensors = [t.detach() for t in inputs(9, True, spec=spec)]
    expected = definition(*tensors)
    state, step = state_of(tensors), ReferenceMamba3Step()
    assert state is not None
    ys = [step(*(t[:, i] for t in tensors[:7]), *tensors[7:10], state=state) for i in range(9)]
    assert_equal((torch.stack(ys, 1), state.h, state.angle.cos(), state.k, state.v), expected)


def test_angles_of_a_long_text_stay_exact_in_fp32():
    tensors = [t.detach() for t in inputs(4096, False, 1)]
    expected = recurrence(*tensors)[0]
    y = flat(ReferenceMamba3(64))(*(t.float() for t in tensors))[0]
    assert (y.double() - expected).norm() < 2e-4 * expected.norm()
