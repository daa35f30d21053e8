"""Cross entropy over the vocabulary, averaged over tokens with a label, plus a z-loss.

`plain` keeps all logits for the backward pass. `chunked` never holds more than a chunk of them: the gradient of
a cross entropy is known as soon as the logits are, so it is computed, and pushed through the head, at once.
Three matrix products in all, as in the plain form, and nothing is computed twice.

Tensor-parallel ranks have the logits of a part of the vocabulary each. Of every token they exchange the largest logit, then the
sum of exponentials and the label's logit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.models.config import LossConfig
from llmtrain.models.tensor_parallel import TensorRanks

IGNORE = -100


@dataclass
class LossOutput:
    """Scalars on the model's device, in fp32 or wider. Without any label all are 0.

    loss: to differentiate. terms: detached, by the names under which they are logged, such as `cross_entropy`, in nats per label,
    and `z`, the weighted z-loss, where there is one. n_tokens: tokens with a label.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    n_tokens: Tensor

    def each(self, function: Callable[[Tensor], Tensor]) -> LossOutput:
        """A function of every tensor."""
        terms = {name: function(term) for name, term in self.terms.items()}
        return LossOutput(function(self.loss), terms, function(self.n_tokens))


@dataclass
class TokenScores:
    """Per token. log_likelihood: of the label in nats, fp32 or wider. greedy: the label is the argmax.

    0 and True where there is no label.
    """

    log_likelihood: Tensor
    greedy: Tensor


@torch.no_grad()
def score_tokens(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    chunk_tokens: int = 8192,
    ranks: TensorRanks | None = None,
) -> TokenScores:
    """The label's log-likelihood at each token; logits exist for labelled ones alone, a chunk at a time. Shapes as PlainLoss."""
    at = labels != IGNORE
    found = score_hidden(hidden[at], weight, labels[at], softcap, chunk_tokens, ranks)
    zeros = torch.zeros(labels.shape, dtype=found.log_likelihood.dtype, device=hidden.device)
    scores = TokenScores(zeros, torch.ones_like(at))
    scores.log_likelihood[at], scores.greedy[at] = found.log_likelihood, found.greedy
    return scores


@torch.no_grad()
def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    chunk_tokens: int = 8192,
    ranks: TensorRanks | None = None,
) -> TokenScores:
    """The same where every token has a label. hidden: [n, d_model]; labels: [n] -> scores [n]."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    parts = [(torch.zeros(0, dtype=wide, device=hidden.device), torch.ones(0, dtype=torch.bool, device=hidden.device))]
    for x, label in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        logits = soft_cap(all_logits(x, weight, ranks).to(wide), softcap)
        # One kernel; logsumexp would be four, each of them over all logits.
        likelihood = -F.cross_entropy(logits, label, reduction="none")
        parts.append((likelihood, logits.argmax(dim=-1) == label))
    return TokenScores(*(torch.cat(some) for some in zip(*parts, strict=True)))


def label_likelihoods(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    chunk_tokens: int = 8192,
    ranks: TensorRanks | None = None,
    wide_products: bool = False,
) -> Tensor:
    """Log-likelihood of the label of each token in nats, [n], with gradients. Logits are computed again for the backward pass, a
    chunk at a time. hidden: [n, d_model]; labels: [n]; weight, wide_products: as ChunkedLoss."""
    return _LabelLikelihoods.apply(
        hidden, weight, labels, softcap, chunk_tokens, ranks, wide_products and hidden.is_cuda
    )


class _LabelLikelihoods(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        softcap: float | None,
        chunk_tokens: int,
        ranks: TensorRanks | None,
        wide_products: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.settings = softcap, chunk_tokens, ranks, wide_products
        likelihood = _compiled_likelihood() if hidden.is_cuda else _likelihood
        parts = [
            likelihood(h @ weight.t(), y, softcap, ranks)[: end - at]
            for h, y, at, end in _padded_chunks(hidden, labels, chunk_tokens)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, d_likelihood: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight, labels), (softcap, chunk_tokens, ranks, wide_products) = ctx.saved_tensors, ctx.settings
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.empty(weight.shape, dtype=d_likelihood.dtype, device=weight.device) if need_weight else None
        gradient = _compiled_logit_gradient() if hidden.is_cuda else _logit_gradient
        for h, y, at, end in _padded_chunks(hidden, labels, chunk_tokens):
            scale = F.pad(-d_likelihood[at:end], (0, len(h) - (end - at)))
            _, _, d_logits = gradient(h @ weight.t(), y, scale, 0.0, softcap, ranks)
            if d_hidden is not None:
                torch.mm(d_logits[: end - at], weight, out=d_hidden[at:end])
            if d_weight is not None:
                _sum_product(d_weight, d_logits.t(), h, at == 0, wide_products)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None


_LEAST_CHUNK = 256


def _padded_chunks(hidden: Tensor, labels: Tensor, chunk_tokens: int) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """(hidden, labels, first token, one after the last) of chunks; on a GPU the last is filled up with tokens without a label, to a
    power of two: any number of tokens has few shapes, so that nothing is compiled and little memory is allocated anew."""
    n = len(hidden)
    for at in range(0, max(n, 1), chunk_tokens):
        h, y = hidden[at : at + chunk_tokens], labels[at : at + chunk_tokens]
        end = at + len(h)
        if hidden.is_cuda and len(h) < chunk_tokens:
            size = min(max(_LEAST_CHUNK, 1 << (len(h) - 1).bit_length()), chunk_tokens)
            h, y = F.pad(h, (0, 0, 0, size - len(h))), F.pad(y, (0, size - len(y)), value=IGNORE)
        yield h, y, at, end


def _likelihood(logits: Tensor, labels: Tensor, softcap: float | None, ranks: TensorRanks | None) -> Tensor:
    """[n, V], or this rank's part of them, labels [n] -> [n]; of tokens without a label anything."""
    logits = soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    if ranks is not None:
        log_z, picked = _log_z_and_picked(logits, labels, ranks)
        return picked - log_z
    return logits.gather(1, labels.clamp(min=0)[:, None])[:, 0] - torch.logsumexp(logits, dim=-1)


@functools.cache
def _compiled_likelihood():
    return torch.compile(_likelihood, dynamic=False)


def all_logits(hidden: Tensor, weight: Tensor, ranks: TensorRanks | None = None) -> Tensor:
    """[..., d_model] -> [..., vocab_size], of all tensor-parallel ranks, each with its part of the weight [vocab_size, d_model];
    without gradient where there are any."""
    logits = F.linear(hidden, weight)
    return logits if ranks is None else ranks.beside(logits)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(logits / cap), or the logits as they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def loss_type(config: LossConfig, platform: Platform) -> Literal["plain", "chunked"]:
    """The form of the loss: with auto, plain on a CPU, which gains no memory worth having and loses the overlap of one large matrix
    product by chunks."""
    if config.type != "auto":
        return config.type
    return "plain" if platform.vendor == "cpu" else "chunked"


def build_loss(config: LossConfig, softcap: float | None, platform: Platform) -> PlainLoss | ChunkedLoss:
    if loss_type(config, platform) == "plain":
        return PlainLoss(config, softcap)
    return ChunkedLoss(config, softcap, platform.sums_products_in_fp32)


class PlainLoss:
    """The readable form, and the reference of ChunkedLoss."""

    def __init__(self, config: LossConfig, softcap: float | None):
        self.config, self.softcap = config, softcap

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, ranks: TensorRanks | None = None) -> LossOutput:
        """hidden: [batch, T, d_model]; weight: [vocab, d_model], or this rank's part of it; labels: [batch, T]."""
        logits = F.linear(hidden, weight).flatten(0, -2)
        logits = soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), self.softcap)
        labels = labels.flatten()
        n_tokens = (labels != IGNORE).sum()
        count = n_tokens.clamp(min=1)
        if ranks is None:
            ce = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / count
            log_z = torch.logsumexp(logits, dim=-1) if self.config.z_loss else None
        else:
            log_z, picked = _log_z_and_picked(logits, labels, ranks)
            ce = (log_z - picked).masked_fill(labels == IGNORE, 0.0).sum() / count
        z = torch.zeros_like(ce)
        if self.config.z_loss and log_z is not None:
            z = self.config.z_loss * log_z.masked_fill(labels == IGNORE, 0.0).square().sum() / count
        return LossOutput(ce + z, _terms(self.config, ce.detach(), z.detach()), n_tokens)


class ChunkedLoss:
    """Holds logits of at most `chunk_tokens` tokens at a time.

    wide_products: see Platform.sums_products_in_fp32.
    """

    def __init__(self, config: LossConfig, softcap: float | None, wide_products: bool = False):
        self.config, self.softcap, self.wide_products = config, softcap, wide_products

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, ranks: TensorRanks | None = None) -> LossOutput:
        """hidden: [batch, T, d_model]; weight: [vocab, d_model], or this rank's part of it; labels: [batch, T]."""
        labels = labels.flatten()
        n_tokens = (labels != IGNORE).sum()
        config = self.config
        loss, ce, z = _ChunkedCrossEntropy.apply(
            *(hidden.flatten(0, -2), weight, labels, n_tokens, config.chunk_tokens, config.z_loss, self.softcap, ranks),
            self.wide_products and hidden.is_cuda,
        )
        return LossOutput(loss, _terms(config, ce, z), n_tokens)


def _terms(config: LossConfig, ce: Tensor, z: Tensor) -> dict[str, Tensor]:
    return {"cross_entropy": ce} | ({"z": z} if config.z_loss else {})


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        n_tokens: Tensor,
        chunk_tokens: int,
        z_loss: float,
        softcap: float | None,
        ranks: TensorRanks | None,
        wide_products: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: [N, d]; weight: [V, d]; labels: [N]. Returns loss, ce and z; gradients wait in ctx."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scale = 1.0 / n_tokens.clamp(min=1).to(wide)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.empty(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        gradient = _compiled_logit_gradient() if hidden.is_cuda else _logit_gradient
        sums = []
        for h, y, at in _chunks(hidden, labels, chunk_tokens):
            ce, z, d_logits = gradient(h @ weight.t(), y, scale, z_loss, softcap, ranks)
            sums.append(torch.stack((ce, z)))
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[at : at + len(h)])
            if d_weight is not None:
                _sum_product(d_weight, d_logits.t(), h, at == 0, wide_products)
        ce, z = torch.stack(sums).sum(0).unbind()
        ctx.gradients, ctx.weight_dtype = (d_hidden, d_weight), weight.dtype
        ce, z = ce.clone(), z.clone()
        ctx.mark_non_differentiable(ce, z)
        return ce + z, ce, z

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, d_ce: Tensor, d_z: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        d_hidden = None if d_hidden is None else d_hidden * d_loss.to(d_hidden.dtype)
        if d_weight is not None:
            d_weight = torch.mul(d_weight, d_loss, out=torch.empty_like(d_weight, dtype=ctx.weight_dtype))
        return d_hidden, d_weight, None, None, None, None, None, None, None


def _sum_product(total: Tensor, a: Tensor, b: Tensor, first: bool, wide_products: bool) -> None:
    """total += a @ b, or without what it holds if it is the first. A sum in fp32 of 16-bit matrices is one pass with wide_products;
    otherwise the product is rounded and added by itself, which reads and writes all of the sum once more."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=0 if first else 1, out=total)
    elif wide_products and first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    elif wide_products:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def _chunks(hidden: Tensor, labels: Tensor, chunk_tokens: int):
    """(hidden, labels, first token) of near-equal chunks: equal shapes spare a recompilation."""
    n = hidden.shape[0]
    count = -(-n // chunk_tokens)
    size = -(-n // count)
    for at in range(0, n, size):
        yield hidden[at : at + size], labels[at : at + size], at


def _logit_gradient(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor,
    z_loss: float,
    softcap: float | None,
    ranks: TensorRanks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Elementwise part of one chunk: summed and scaled ce and z, and d loss / d logits in the logits' dtype.

    logits: [n, V], or this rank's part of them; labels: [n]; scale: 1 / number of labels of the batch, or [n], of each token.
    With p = softmax(l): d ce / d l = p - onehot(label), d z / d l = 2 * z_loss * logsumexp(l) * p.
    """
    raw = logits.to(scale.dtype)
    capped = soft_cap(raw, softcap)
    valid = labels != IGNORE
    first = 0 if ranks is None else ranks.rank * logits.shape[1]
    if ranks is None:
        log_z = torch.logsumexp(capped, dim=-1)
        picked = capped.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    else:
        log_z, picked = _log_z_and_picked(capped, labels, ranks)
    row_scale = torch.where(valid, scale, 0.0)
    ce = ((log_z - picked) * row_scale).sum()
    z = z_loss * (log_z.square() * row_scale).sum()
    p = torch.exp(capped - log_z[:, None])
    d = p * (1 + 2 * z_loss * log_z)[:, None]
    d = torch.where(torch.arange(first, first + logits.shape[1], device=logits.device) == labels[:, None], d - 1, d)
    if softcap is not None:
        d = d * (1 - (capped / softcap).square())
    return ce, z, (d * row_scale[:, None]).to(logits.dtype)


def _log_z_and_picked(logits: Tensor, labels: Tensor, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """logsumexp over the whole vocabulary, and each label's logit (0 without one), of this rank's logits [n, V / size]."""
    own = labels - ranks.rank * logits.shape[1]
    elsewhere = (own < 0) | (own >= logits.shape[1])
    picked = logits.gather(1, own.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0.0)
    largest = ranks.largest(logits.amax(dim=-1))
    exponentials = torch.exp(logits - largest[:, None]).sum(-1)
    exponentials, picked = ranks.total(torch.stack((exponentials, picked))).unbind()
    return largest + exponentials.log(), picked


@functools.cache
def _compiled_logit_gradient():
    return torch.compile(_logit_gradient, dynamic=False)
