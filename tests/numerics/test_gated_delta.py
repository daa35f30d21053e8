"""The chunked delta rules, gated by head or by channel, against the recurrence, one token at a time in float64."""

import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform, registry
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.step import gated_delta_step
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.operation import operation, wide
from tests.support import kernels as support

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "20261123"))
BATCH, H, K, V = 2, 4, 5, 6
NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")
RULES = {"gated_delta": GatedDeltaSpec, "kimi_delta": KimiDeltaSpec}


@pytest.fixture(params=RULES)
def delta(request):
    """The specification of either rule."""
    return RULES[request.param]


def rule_of(spec: GatedDeltaSpec) -> registry.Operation:
    return "kimi_delta" if isinstance(spec, KimiDeltaSpec) else "gated_delta"


def kernel_of(spec: GatedDeltaSpec):
    return registry.resolve(rule_of(spec), "auto", spec, platform.cpu()).build(spec, platform.cpu())


def recurrence(q, k, v, log_decay, beta, state=None) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv:2412.06464 with the matrices written out: S_t = S_(t-1) alpha_t (I - beta_t k_t k_t^T) +
    beta_t v_t k_t^T; y_t = S_t q_t. By channel (arXiv:2510.26692, equation 1) alpha_t is a diagonal matrix. The state is S^T."""
    (batch, seq_len, heads, d_value), d_key = v.shape, k.shape[3]
    q, k = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (q, k))
    S = torch.zeros(batch, heads, d_value, d_key, dtype=v.dtype) if state is None else state.mT
    ys = []
    for t in range(seq_len):
        key, scale = k[:, t, :, :, None], beta[:, t, :, None, None]
        keep = torch.eye(d_key, dtype=v.dtype) - scale * key @ key.mT
        decay = log_decay[:, t].view(batch, heads, 1, -1).exp()
        S = (S * decay) @ keep + scale * v[:, t, :, :, None] @ key.mT
        ys.append((S @ q[:, t, :, :, None])[..., 0])
    return torch.stack(ys, 1), S.mT


def inputs(
    spec: GatedDeltaSpec, seq_len: int, with_state: bool, seed: int = 0, most: float = 1.0, batch: int = BATCH
) -> list[Tensor]:
    """Leaves in float64."""
    rule, options = operation(rule_of(spec)), {"most": most, "state": with_state}
    return wide(rule.inputs(replace(spec, dtype="float64"), batch, seq_len, "cpu", 1000 * seed + seq_len, **options)[0])


def assert_equal(ours: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for name, a, b in zip(("y", "state", *NAMES), ours, expected, strict=False):
        torch.testing.assert_close(
            a.double(), b, atol=tolerance, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert len(ours) == len(expected)


CASES = {
    "one chunk": ((H, 16), 16, False),
    "shorter than a chunk": ((H, 16), 5, True),
    "one token": ((H, 64), 1, True),
    "whole chunks": ((H, 8), 32, False),
    "a ragged last chunk": ((H, 8), 27, True),
    "chunks of one token": ((H, 1), 7, True),
    "grouped keys": ((2, 8), 27, True),
    "one key head": ((1, 8), 20, False),
    "chunks of the default size": ((2, 64), 150, True),
}


@pytest.mark.parametrize("sizes, seq_len, with_state", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("most", [1.0, 2.0], ids=["", "negative eigenvalues"])
def test_chunked_form_equals_the_recurrence(delta, sizes, seq_len, with_state, most):
    key_heads, chunk_size = sizes
    spec = delta(H, key_heads, K, V, chunk_size=chunk_size)
    tensors = inputs(spec, seq_len, with_state, most=most)
    assert_equal(support.outcome(kernel_of(spec), tensors), support.outcome(recurrence, tensors))


@pytest.mark.parametrize("case", range(20))
def test_random_shapes(delta, case):
    rng = random.Random(f"{SEED} {case}")
    key_heads = rng.randint(1, 3)
    sizes = (key_heads * rng.randint(1, 3), key_heads, rng.randint(1, 9), rng.randint(1, 9))
    chunk = rng.randint(1, 20) if delta is GatedDeltaSpec else 2 ** rng.randint(0, 5)
    spec = delta(*sizes, chunk_size=chunk)
    tensors = inputs(spec, rng.randint(1, 50), rng.random() < 0.5, case, rng.choice([1.0, 2.0]), rng.randint(1, 3))
    assert_equal(support.outcome(kernel_of(spec), tensors), support.outcome(recurrence, tensors))


def test_fp32_is_as_close_as_it_can_be(delta):
    spec = delta(H, 2, K, V, "float32")
    exact = inputs(spec, 150, True)
    ours = support.outcome(kernel_of(spec), [t.detach().float().requires_grad_() for t in exact])
    assert_equal(ours, support.outcome(recurrence, exact), 5e-5)


@pytest.mark.parametrize("cut", [1, 8, 13, 29])
def test_the_state_continues_a_sequence(delta, cut):
    """Also backwards: gradients pass through the state where a sequence is cut."""
    spec = delta(H, 2, K, V, chunk_size=8)
    kernel, tensors = kernel_of(spec), inputs(spec, 30, True)

    def in_two(*given):
        *tokens, state = given
        first, state = kernel(*(t[:, :cut] for t in tokens), state)
        second, state = kernel(*(t[:, cut:] for t in tokens), state)
        return torch.cat([first, second], 1), state

    assert_equal(support.outcome(in_two, tensors), support.outcome(kernel, tensors))


@pytest.mark.parametrize("lengths", [(30,), (8, 8, 14), (5, 1, 17, 7), (1,) * 30], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_documents_of_one_sequence_equal_the_documents_apart(delta, lengths, with_state):
    """Chunks of 8. The initial state goes to the first document; what is final is the last one's."""
    spec = delta(H, 2, K, V, chunk_size=8)
    tensors = inputs(spec, 30, with_state)
    ids = torch.cat([torch.full((BATCH, n), i) for i, n in enumerate(lengths)], 1)

    def apart(q, k, v, log_decay, beta, state=None):
        ys, final = [], state
        pieces = zip(*(t.split(lengths, 1) for t in (q, k, v, log_decay, beta)), strict=True)
        for i, piece in enumerate(pieces):
            y, final = recurrence(*piece, state=state if i == 0 else None)
            ys.append(y)
        return torch.cat(ys, 1), final

    kernel = kernel_of(spec)
    assert_equal(support.outcome(lambda *t: kernel(*t, document_ids=ids), tensors), support.outcome(apart, tensors))


def test_rows_have_their_own_documents(delta):
    spec = delta(H, 2, K, V, chunk_size=8)
    kernel, tensors = kernel_of(spec), [t.detach() for t in inputs(spec, 30, True)]
    ids = torch.tensor([[0] * 11 + [1] * 19, [3] * 24 + [4] * 6])
    y, final = kernel(*tensors, document_ids=ids)
    for row in range(2):
        alone = kernel(*(t[row : row + 1] for t in tensors), document_ids=ids[row : row + 1])
        assert_equal([y[row : row + 1], final[row : row + 1]], list(alone))


def test_strong_decay_gives_finite_gradients(delta):
    """Above the diagonal the decay between two tokens would overflow: it must be masked before exp."""
    spec = delta(H, 2, K, V, "float32")
    tensors = [t.detach().float() for t in inputs(spec, 100, True)]
    tensors[3] = torch.full_like(tensors[3], -50.0)
    results = support.outcome(kernel_of(spec), [t.requires_grad_() for t in tensors])
    assert all(torch.isfinite(t).all() for t in results)
    assert all(t.abs().max() < 1e3 for t in results)


@pytest.mark.parametrize("decay", [-1e9, float("-inf")])
def test_a_token_that_forgets_all_leaves_the_decays_of_later_tokens_exact(delta, decay):
    """In fp32, where sums with such a number would have no digits of the others."""
    spec = delta(H, 2, K, V, "float32")
    tensors = [t.detach() for t in inputs(replace(spec, dtype="float64"), 40, True)]
    tensors[3][:, ::7] = decay
    found = support.outcome(kernel_of(spec), [t.float().requires_grad_() for t in tensors])
    expected = support.outcome(recurrence, [t.requires_grad_() for t in tensors])
    for name, one, value in zip(("y", "state", *NAMES), found, expected, strict=False):
        value = value.nan_to_num()  # the recurrence's own gradient of a decay of -inf
        assert (one.double() - value).norm() <= 1e-4 * value.norm() + 1e-6, name


@pytest.mark.parametrize("decays", [(0.0, -1e-6, -5.0, -90.0, -1e4), (0.0,) * K, (-1e4,) * K], ids=str)
def test_channels_that_forget_at_once_stand_beside_some_that_never_do(decays):
    spec = KimiDeltaSpec(H, H, K, V)
    tensors = inputs(spec, 150, True)
    tensors[3] = torch.tensor(decays, dtype=torch.float64).expand_as(tensors[3]).clone().requires_grad_()
    assert_equal(support.outcome(kernel_of(spec), tensors), support.outcome(recurrence, tensors))


@pytest.mark.parametrize("most", [1.0, 2.0])
def test_equal_keys_without_decay_stay_stable_in_fp32(delta, most):
    """The worst system: every token rewrites what the one before wrote."""
    spec = delta(H, 2, K, V, "float32")
    exact = [t.detach() for t in inputs(spec, 512, False)]
    exact[1][:] = exact[1][:, :1].clone()
    exact[3].zero_()
    exact[4].fill_(0.999 * most)
    expected, state = recurrence(*exact)
    y, final = kernel_of(spec)(*(t.float() for t in exact))
    assert (y.double() - expected).norm() < 1e-4 * expected.norm()
    assert (final.double() - state).norm() < 1e-4 * state.norm()


def test_bf16_inputs_keep_their_dtype_and_the_state_is_fp32(delta):
    spec = delta(H, 2, K, V)
    exact = [t.detach() for t in inputs(spec, 300, False)]
    narrow = [t.to(torch.bfloat16) for t in exact[:3]] + [t.float() for t in exact[3:]]
    expected, expected_state = recurrence(*(t.double() for t in narrow))
    y, state = kernel_of(spec)(*narrow)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - expected).norm() < 3e-3 * expected.norm(), "rounded once, at the end"
    assert (state.double() - expected_state).norm() < 1e-5 * expected_state.norm()


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_a_step_is_one_token_of_the_recurrence(delta, key_heads):
    spec = delta(H, key_heads, K, V)
    *tokens, state = (t.detach() for t in inputs(spec, 9, True, most=2.0))
    expected, final = recurrence(*tokens, state=state)
    kept = state.clone()
    ys = [gated_delta_step(*(t[:, i] for t in tokens), state=kept) for i in range(9)]
    assert_equal([torch.stack(ys, 1), kept], [expected, final])


def test_flops_are_those_of_the_recurrence():
    """Per token and head S k, the outer product and S q: 2 FLOP each for every element of the state."""
    assert GatedDeltaSpec(H, 2, K, V).flops(7) == 7 * H * 3 * 2 * K * V
    assert GatedDeltaSpec(H, 2, K, V, chunk_size=3).flops(7) == GatedDeltaSpec(H, 2, K, V).flops(7)
