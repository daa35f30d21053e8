"""Losses of preferences between answers, as formulas of sums over an answer's tokens.

A pair has a chosen answer w and a rejected one l. With the policy's log-probability of an answer and the reference model's,
s = log p(y | x) - log p_ref(y | x), |y| the answer's tokens, d = s_w - s_l:

    sigmoid    -log sigmoid(beta d)                                            ipo   (s_w / |y_w| - s_l / |y_l| - 1 / (2 beta))^2
    hinge      max(0, 1 - beta d)                                              ipo_sum                     (d - 1 / (2 beta))^2
    robust     (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
    apo_zero   (1 - sigmoid(beta s_w)) + sigmoid(beta s_l)
    apo_down   sigmoid(beta s_w) + (1 - sigmoid(beta d))
    simpo      -log sigmoid(beta (log p_w / |y_w| - log p_l / |y_l|) - gamma)
    orpo       -beta log sigmoid(log odds_w - log odds_l), odds of p^(1/|y|); beside the cross entropy of prompt and chosen answer
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.objectives.sections import PreferenceSection


@dataclass(frozen=True)
class Answers:
    """log_p: log-probabilities of answers, with gradient; reference: those of the reference model (0 without one); tokens: their
    lengths. Each [pairs, 2], the chosen answer first; of `kto` [answers, 2], the answer first, then another's to its prompt."""

    log_p: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """s, [pairs, 2]."""
        return self.log_p - self.reference

    @property
    def mean_log_p(self) -> Tensor:
        return self.log_p / self.tokens


Loss = Callable[[Answers, PreferenceSection], Tensor]
"""-> loss of each pair, [pairs]."""


def _smoothed(x: Tensor, wrong: float) -> Tensor:
    """Cross entropy of a pair's order, which is wrong with this probability."""
    return -(1 - wrong) * F.logsigmoid(x) - wrong * F.logsigmoid(-x)


def _difference(of: Answers, to: PreferenceSection) -> Tensor:
    """d, [pairs]; with normalize_length of means over tokens."""
    chosen, rejected = (of.ratio / of.tokens if to.normalize_length else of.ratio).unbind(1)
    return chosen - rejected


def _robust(of: Answers, to: PreferenceSection) -> Tensor:
    x, wrong = to.beta * _difference(of, to), to.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(x) + wrong * F.logsigmoid(-x)) / (1 - 2 * wrong)


def _ipo(of: Answers, to: PreferenceSection) -> Tensor:
    chosen, rejected = (of.ratio / of.tokens).unbind(1)
    return (chosen - rejected - 1 / (2 * to.beta)).square()


def _ipo_sum(of: Answers, to: PreferenceSection) -> Tensor:
    chosen, rejected = of.ratio.unbind(1)
    return (chosen - rejected - 1 / (2 * to.beta)).square()


def _apo_zero(of: Answers, to: PreferenceSection) -> Tensor:
    chosen, rejected = (to.beta * of.ratio).unbind(1)
    return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)


def _apo_down(of: Answers, to: PreferenceSection) -> Tensor:
    chosen, rejected = (to.beta * of.ratio).unbind(1)
    return torch.sigmoid(chosen) + 1 - torch.sigmoid(chosen - rejected)


def _simpo(of: Answers, to: PreferenceSection) -> Tensor:
    chosen, rejected = of.mean_log_p.unbind(1)
    return _smoothed(to.beta * (chosen - rejected) - to.gamma, to.label_smoothing)


def _orpo(of: Answers, to: PreferenceSection) -> Tensor:
    """The part of the odds alone: the cross entropy beside it is a mean over tokens (Preference.loss)."""
    log_odds = of.mean_log_p - _log_complement(of.mean_log_p)
    return -to.beta * F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def _log_complement(log_p: Tensor) -> Tensor:
    """log(1 - p), from log p below 0, without cancellation on either side (Maechler 2012)."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    close = log_p > -0.6931471805599453
    # The branch that is not taken gets a value for which its gradient is finite.
    near = torch.log(-torch.expm1(torch.where(close, log_p, -1.0)))
    return torch.where(close, near, torch.log1p(-torch.exp(torch.where(close, -1.0, log_p))))


LOSSES: dict[str, Loss] = {
    "sigmoid": lambda of, to: _smoothed(to.beta * _difference(of, to), to.label_smoothing),
    "ipo": _ipo,
    "ipo_sum": _ipo_sum,
    "hinge": lambda of, to: torch.relu(1 - to.beta * _difference(of, to)),
    "robust": _robust,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "simpo": _simpo,
    "orpo": _orpo,
}


def kto(of: Answers, desirable: Tensor, kl: Tensor, to: PreferenceSection) -> Tensor:
    """1 - sigmoid(beta (s - z)) of desirable answers, 1 - sigmoid(beta (z - s)) of others, with their weights: [answers].

    desirable: bool [answers]. kl: z, the mean of s over mismatched answers of the whole step, at least 0 (arXiv:2402.01306, eq. 7).
    """
    x = to.beta * (of.ratio[:, 0] - kl)
    weight = torch.where(desirable, to.desirable_weight, to.undesirable_weight)
    return weight * (1 - torch.sigmoid(torch.where(desirable, x, -x)))
