"""Losses of a policy on answers that it has drawn, as formulas of their tokens' log-probabilities.

An answer o_i to a prompt, one of a group of G, has reward r_i and advantage A_i = (r_i - mean) / (std + eps) within its group. With
rho the ratio of a token's probability to that when the step's answers were scored, and e_low, e_high the clip,

    l = -min(rho A, clip(rho, 1 - e_low, 1 + e_high) A) + beta KL

is a token's loss; gspo takes for rho the geometric mean of an answer's ratios (Zheng et al., arXiv:2507.18071). Sums over tokens:

    grpo, gspo   mean over answers of the mean over their tokens (Shao et al., arXiv:2402.03300)
    bnpo, dapo   mean over all tokens: of a microbatch, of the step (Yu et al., arXiv:2503.14476)
    dr_grpo      sum over tokens / (answers * most tokens of an answer) (Liu et al., arXiv:2503.20783)
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "group_biased", "batch", "none"]
KLEstimator = Literal["k1", "k2", "k3"]
ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class PolicyLoss:
    """Settings of a policy's loss. clip_low, clip_high: how far rho may move. beta: factor of the divergence from a reference.
    kl_ratio: the divergence is multiplied by rho, which makes its gradient that of the expectation (TRL's
    use_bias_correction_kl). max_new_tokens: of dr_grpo."""

    name: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo"] = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    beta: float = 0.0
    kl: KLEstimator = "k3"
    kl_ratio: bool = True
    max_new_tokens: int = 0


def advantages(rewards: Tensor, scale: Scale = "group", eps: float = 1e-4) -> tuple[Tensor, Tensor]:
    """(advantages, valid) of groups of answers, both like rewards [groups, G].

    scale: divisor: the standard deviation of the group with Bessel's correction (as TRL) or without (group_biased, as compose-rl),
    that of all valid rewards, or none. A group with a reward that is not finite is set aside: advantages 0, not valid. In a group
    of equal rewards they are 0.
    """
    valid = rewards.isfinite().all(dim=1, keepdim=True).expand_as(rewards)
    clean = torch.where(valid, rewards, 0.0)
    centered = clean - clean.mean(dim=1, keepdim=True)
    if scale == "none":
        return centered, valid
    if scale == "batch":
        found = clean[valid]
        deviation = found.std() if found.numel() > 1 else clean.new_zeros(())
    elif clean.shape[1] == 1:
        deviation = clean.new_zeros(())
    else:
        deviation = clean.std(dim=1, keepdim=True, correction=1 if scale == "group" else 0)
    return centered / (deviation + eps), valid


def divergence(log_p: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate of KL(policy | reference) at each token (Schulman 2020, "Approximating KL divergence"), like log_p."""
    log_ratio = reference - log_p
    if estimator == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if estimator == "k2" else torch.exp(log_ratio) - log_ratio - 1


def token_losses(
    to: PolicyLoss,
    log_p: Tensor,
    old: Tensor,
    mask: Tensor,
    advantage: Tensor,
    reference: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """Loss of each token, [answers, T].

    log_p: with gradient; old: when the step's answers were scored; mask: tokens of answers; advantage: [answers]. reference: of the
    reference model, where beta is not 0. importance: of `importance_weights`, a factor of the policy's part.
    """
    log_ratio = log_p - old
    if to.name == "gspo":
        log_ratio = _mean(log_ratio, mask)[:, None]
    ratio, advantage = torch.exp(log_ratio), advantage[:, None]
    clipped = ratio.clamp(1 - to.clip_low, 1 + to.clip_high)
    losses = -torch.min(ratio * advantage, clipped * advantage)
    if importance is not None:
        losses = losses * importance
    if to.beta:
        assert reference is not None, "a divergence needs a reference"
        kl = divergence(log_p, reference, to.kl)
        losses = losses + to.beta * (kl * ratio if to.kl_ratio else kl)
    return losses.expand_as(log_p)


def reduced(to: PolicyLoss, losses: Tensor, mask: Tensor, step_answers: int, step_tokens: int) -> Tensor:
    """Part of a step's loss that is a microbatch's: the parts of all microbatches and ranks add up to it.

    losses, mask: [answers, T]. step_answers, step_tokens: of the whole step. An answer without a token in the mask counts as one
    with a loss of 0. bnpo's mean is over the microbatch alone; its part is that of its answers.
    """
    mask = mask.to(losses.dtype)
    if to.name in ("grpo", "gspo"):
        return _mean(losses, mask).sum() / step_answers
    total = (losses * mask).sum()
    if to.name == "dr_grpo":
        return total / (step_answers * to.max_new_tokens)
    if to.name == "bnpo":
        return total / mask.sum().clamp(min=1) * (losses.shape[0] / step_answers)
    return total / max(step_tokens, 1)


def importance_weights(
    old: Tensor, sampled: Tensor, mask: Tensor, mode: ImportanceMode = "sequence_mask", most: float = 3.0
) -> Tensor:
    """Ratio of the trainer's to the generator's probabilities of drawn tokens, bounded: [answers, T], or [answers, 1] by sequence.

    old: log-probabilities by the trainer; sampled: by another generator, NaN where it has none (ratio 1). truncate: at most
    `most`; mask: 0 above it.
    """
    difference = torch.where(mask.bool() & sampled.isfinite(), old - sampled, 0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=most) if mode.endswith("truncate") else torch.where(ratio > most, 0.0, ratio)


def is_clipped(to: PolicyLoss, log_p: Tensor, old: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """Tokens at which the clip stops the gradient, of gspo all or none of an answer: bool [answers, T]."""
    log_ratio = log_p.detach() - old
    if to.name == "gspo":
        log_ratio = _mean(log_ratio, mask)[:, None].expand_as(log_p)
    ratio, advantage = log_ratio.exp(), advantage[:, None]
    stopped = ((ratio < 1 - to.clip_low) & (advantage < 0)) | ((ratio > 1 + to.clip_high) & (advantage > 0))
    return stopped & mask.bool()


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of each answer, [answers]."""
    mask = mask.to(values.dtype)
    return (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
