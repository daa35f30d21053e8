"""The chunked loss against the plain one, and the plain one against its definition."""

import pytest
import torch

from llmtrain.kernels import platform
from llmtrain.models.config import LossConfig
from llmtrain.models.loss import ChunkedLoss, LossOutput, PlainLoss, build_loss, label_likelihoods

B, T, D, V = 2, 15, 8, 50


def problem(dtype=torch.float32, unlabelled: float = 0.3):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, T), generator=g)
    labels[torch.rand(B, T, generator=g) < unlabelled] = -100
    return hidden, weight, labels


def outcome(loss_function, dtype=torch.float32, unlabelled=0.3, upstream=1.0) -> tuple[LossOutput, list[torch.Tensor]]:
    hidden, weight, labels = problem(dtype, unlabelled)
    out = loss_function(hidden, weight, labels)
    return out, list(torch.autograd.grad(out.loss * upstream, (hidden, weight)))


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1000, 30, 7])
def test_chunked_equals_plain(z_loss, softcap, chunk):
    plain, plain_grads = outcome(PlainLoss(LossConfig(z_loss=z_loss), softcap), upstream=0.5)
    chunked, grads = outcome(ChunkedLoss(LossConfig(z_loss=z_loss, chunk_tokens=chunk), softcap), upstream=0.5)
    torch.testing.assert_close(vars(chunked), vars(plain), atol=1e-5, rtol=1e-5)
    assert ("z" in plain.terms) == bool(z_loss)
    for a, b in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_plain_follows_the_definition():
    hidden, weight, labels = problem(torch.float64)
    out = PlainLoss(LossConfig(z_loss=0.1), 3.0)(hidden, weight, labels)
    ce = z = n = 0
    for h, y in zip(hidden.flatten(0, 1), labels.flatten(), strict=True):
        if y == -100:
            continue
        logits = 3.0 * torch.tanh(weight @ h / 3.0)
        log_z = logits.exp().sum().log()
        ce, z, n = ce + log_z - logits[y], z + 0.1 * log_z**2, n + 1
    assert n == out.n_tokens
    torch.testing.assert_close((out.terms, out.loss.detach()), ({"cross_entropy": ce / n, "z": z / n}, (ce + z) / n))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1000, 30, 7])
def test_likelihoods_of_labels_and_their_gradients_follow_the_definition(softcap, chunk):
    hidden, weight, labels = problem(torch.float64, unlabelled=0.0)
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    given = torch.randn(len(labels), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = logits.log_softmax(-1)[torch.arange(len(labels)), labels]
    found = label_likelihoods(hidden, weight, labels, softcap, chunk)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(one, (hidden, weight), given) for one in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [PlainLoss, ChunkedLoss])
def test_without_any_label_the_loss_is_zero_and_gradients_vanish(kind):
    out, grads = outcome(kind(LossConfig(z_loss=0.1), None), unlabelled=1.1)
    assert (out.loss, *out.terms.values(), out.n_tokens) == (0, 0, 0, 0)
    assert all(torch.count_nonzero(g) == 0 for g in grads)


@pytest.mark.parametrize("kind", [PlainLoss, ChunkedLoss])
def test_bf16_computes_the_loss_in_fp32(kind):
    exact, exact_grads = outcome(PlainLoss(LossConfig(), None), torch.float64)
    out, grads = outcome(kind(LossConfig(chunk_tokens=8), None), torch.bfloat16)
    assert out.loss.dtype == torch.float32
    assert abs(out.loss - exact.loss) < 0.01 * exact.loss
    for a, b in zip(grads, exact_grads, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("kind", [PlainLoss, ChunkedLoss])
def test_only_the_loss_carries_gradients(kind):
    out, _ = outcome(kind(LossConfig(z_loss=0.1), None))
    assert out.loss.requires_grad
    assert not any(term.requires_grad for term in out.terms.values())


def test_chunked_works_without_gradients():
    hidden, weight, labels = problem()
    with torch.no_grad():
        out = ChunkedLoss(LossConfig(chunk_tokens=7), None)(hidden, weight, labels)
    expected = PlainLoss(LossConfig(), None)(hidden, weight, labels)
    torch.testing.assert_close(out.loss, expected.loss.detach())


def test_auto_is_chunked_on_gpus_only():
    h200 = platform.Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
    assert isinstance(build_loss(LossConfig(), None, platform.cpu()), PlainLoss)
    assert isinstance(build_loss(LossConfig(), None, h200), ChunkedLoss)
    assert isinstance(build_loss(LossConfig(type="chunked"), None, platform.cpu()), ChunkedLoss)
