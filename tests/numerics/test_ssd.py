"""The chunked scan against the recurrence it stands for, one token at a time in float64."""

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform, registry
from llmtrain.kernels.ssd.spec import SSDSpec
from tests.support import kernels as support
from tests.support.sequential_ssd import SequentialSSD

BATCH, H, P, N = 2, 4, 8, 5


def inputs(spec: SSDSpec, seq_len: int, dtype: torch.dtype, with_state: bool) -> list[Tensor]:
    return [t.to(dtype).requires_grad_() for t in support.scan_inputs(spec, BATCH, seq_len, torch.float64, with_state)]


CASES = {
    "one chunk": (SSDSpec(H, P, N, 1, 16), 16, False),
    "shorter than a chunk": (SSDSpec(H, P, N, 1, 16), 5, False),
    "whole chunks": (SSDSpec(H, P, N, 1, 8), 32, False),
    "a ragged last chunk": (SSDSpec(H, P, N, 1, 8), 27, True),
    "groups": (SSDSpec(H, P, N, 2, 8), 27, True),
    "one group per head": (SSDSpec(H, P, N, H, 8), 20, False),
    "limited dt": (SSDSpec(H, P, N, 1, 8, dt_limit=(0.4, 1.0)), 19, True),
    "dt with a floor only": (SSDSpec(H, P, N, 1, 8, dt_limit=(0.4, None)), 19, False),
}


@pytest.mark.parametrize("spec, seq_len, with_state", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 5e-5)])
def test_chunked_form_equals_the_recurrence(spec, seq_len, with_state, dtype, tolerance):
    kernel = registry.resolve("ssd", "auto", spec, platform.cpu()).build(spec, platform.cpu())
    exact = inputs(spec, seq_len, torch.float64, with_state)
    expected = support.outcome(SequentialSSD(spec), exact)
    ours = support.outcome(kernel, [t.detach().to(dtype).requires_grad_() for t in exact])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)


def test_the_state_continues_a_sequence():
    spec = SSDSpec(H, P, N, 1, 8)
    kernel = registry.resolve("ssd", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    x, dt, A, B, C, D, dt_bias = (t.detach() for t in inputs(spec, 30, torch.float64, False))
    whole, final = kernel(x, dt, A, B, C, D, dt_bias)
    first, state = kernel(x[:, :13], dt[:, :13], A, B[:, :13], C[:, :13], D, dt_bias)
    second, end = kernel(x[:, 13:], dt[:, 13:], A, B[:, 13:], C[:, 13:], D, dt_bias, state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, final)


@pytest.mark.parametrize("lengths", [(30,), (8, 8, 14), (5, 1, 17, 7), (1,) * 30], ids=str)
@pytest.mark.parametrize("with_state", [False, True])
def test_documents_of_one_sequence_equal_the_documents_apart(lengths, with_state):
    """Chunks of 8. The initial state goes to the first document; what is final is the last one's."""
    spec = SSDSpec(H, P, N, 2, 8)
    kernel = registry.resolve("ssd", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    tensors = inputs(spec, 30, torch.float64, with_state)
    ids = torch.cat([torch.full((BATCH, n), i) for i, n in enumerate(lengths)], 1)

    def apart(x, dt, A, B, C, D, dt_bias, state=None):
        ys, final = [], state
        pieces = [t.split(lengths, 1) for t in (x, dt, B, C)]
        for i in range(len(lengths)):
            x, dt, B, C = (of[i] for of in pieces)
            y, final = SequentialSSD(spec)(x, dt, A, B, C, D, dt_bias, state if i == 0 else None)
            ys.append(y)
        return torch.cat(ys, 1), final

    ours, expected = support.outcome(lambda *t: kernel(*t, document_ids=ids), tensors), support.outcome(apart, tensors)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_strong_decay_gives_finite_gradients():
    """Above the diagonal exp(log_decay_i - log_decay_j) would overflow: it must be masked before exp."""
    spec = SSDSpec(H, P, N, 1, 64)
    kernel = registry.resolve("ssd", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    tensors = inputs(spec, 100, torch.float32, False)
    tensors[2] = torch.full((H,), -50.0, requires_grad=True)
    results = support.outcome(kernel, tensors)
    assert all(torch.isfinite(t).all() for t in results)
    assert results[4].abs().max() < 1e3


def test_bf16_inputs_keep_their_dtype_and_the_state_is_fp32():
    spec = SSDSpec(H, P, N, 1, 8)
    kernel = registry.resolve("ssd", "reference", spec, platform.cpu()).build(spec, platform.cpu())
    exact = [t.detach() for t in inputs(spec, 27, torch.float64, False)]
    expected, _ = SequentialSSD(spec)(*exact)
    half = [t.to(torch.bfloat16) if t.ndim > 1 else t.float() for t in exact]
    y, state = kernel(*half)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - expected).norm() < 0.02 * expected.norm()
