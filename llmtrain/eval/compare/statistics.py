"""Paired differences between two models: estimate, standard error, 95 % interval and test. Imports no torch.

Both models answer the same documents, so the difference is taken document by document; what makes a document hard for both cancels.

- Metrics whose documents count 0 or 1 (accuracies): Tango's score interval (Statistics in Medicine 17, 1998) with the variance
  of Miettinen and Nurminen (4, 1985), n / (n - 1) of it, which also covers where few documents differ or accuracies are near
  0 or 1; and McNemar's test, exact, by its mid-p value.
- All other metrics: each document's linearised contribution to the difference (delta method), with the jackknife's variance
  and a t distribution. Documents of unequal weight (long and short texts) leave fewer degrees of freedom.
- Averages over parts (categories, gauntlets): the parts' intervals combined by Zou and Donner (Statistics in Medicine 27, 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from llmtrain.eval.report.metrics import WeightedSum, estimate, is_perplexity

Z = 1.959963984540054
"""97.5 % quantile of the normal distribution."""

MCNEMAR, T_TEST, COMBINED = "McNemar's test, mid-p", "paired t-test", "combined paired tests"


@dataclass(frozen=True)
class Difference:
    """Value of B minus value of A, in the metric's unit. low, high: the 95 % interval; p: two-sided, of "no difference".

    stderr, low, high and p are None where there are too few documents. null_stderr: the standard error if there is no difference,
    for tests of averages.
    """

    a: float
    b: float
    stderr: float | None
    low: float | None
    high: float | None
    p: float | None
    n: int
    test: str
    null_stderr: float | None = None

    @property
    def value(self) -> float:
        return self.b - self.a

    def rescaled(self, baseline: float, scale: float) -> Difference:
        """Difference of (metric - baseline) / scale."""

        def divided(value: float | None) -> float | None:
            return None if value is None else value / scale

        return Difference(
            (self.a - baseline) / scale,
            (self.b - baseline) / scale,
            divided(self.stderr),
            divided(self.low),
            divided(self.high),
            self.p,
            self.n,
            self.test,
            divided(self.null_stderr),
        )


def paired_difference(metric: str, a: Sequence[WeightedSum], b: Sequence[WeightedSum]) -> Difference:
    """Difference of a metric. a[i] and b[i] are the two models' contributions of one document, with equal weights."""
    if all(item in ((0.0, 1.0), (1.0, 1.0)) for items in (a, b) for item in items):
        return _of_hits(metric, a, b)
    return _of_ratios(metric, a, b)


def combined(parts: Sequence[tuple[Difference, float]]) -> Difference:
    """Difference of the weighted mean of independent parts."""
    total = sum(weight for _, weight in parts)
    shares = [(part, weight / total) for part, weight in parts]
    a, b = (sum(getattr(part, side) * share for part, share in shares) for side in "ab")
    n, known = sum(part.n for part, _ in shares), all(part.low is not None for part, _ in shares)
    if not known:
        return Difference(a, b, None, None, None, None, n, COMBINED)

    def root_sum(values: Sequence[float]) -> float:
        return math.sqrt(sum((value * share) ** 2 for value, (_, share) in zip(values, shares, strict=True)))

    down = root_sum([part.value - (part.low or 0.0) for part, _ in shares])
    up = root_sum([(part.high or 0.0) - part.value for part, _ in shares])
    null = root_sum([part.null_stderr or 0.0 for part, _ in shares])
    return Difference(
        a,
        b,
        root_sum([part.stderr or 0.0 for part, _ in shares]),
        b - a - down,
        b - a + up,
        math.erfc(abs(b - a) / null / math.sqrt(2)) if null else 1.0,
        n,
        COMBINED,
        null,
    )


def _of_hits(metric: str, a: Sequence[WeightedSum], b: Sequence[WeightedSum]) -> Difference:
    n = len(a)
    only_a = sum(one[0] > other[0] for one, other in zip(a, b, strict=True))
    only_b = sum(one[0] < other[0] for one, other in zip(a, b, strict=True))
    share, value = (only_a + only_b) / n, (only_b - only_a) / n
    before, after = estimate(metric, a).value, estimate(metric, b).value
    if n == 1:
        return Difference(before, after, None, None, None, None, n, MCNEMAR)
    stderr, null = math.sqrt(max(share - value**2, 0.0) / (n - 1)), math.sqrt(share / n)
    low, high = score_interval(only_b, only_a, n)
    return Difference(before, after, stderr, low, high, mcnemar(only_a, only_b), n, MCNEMAR, null)


def _of_ratios(metric: str, a: Sequence[WeightedSum], b: Sequence[WeightedSum]) -> Difference:
    n, weights = len(a), [weight for _, weight in a]
    total = sum(weights)
    before, after = estimate(metric, a).value, estimate(metric, b).value
    influence = [
        after_one - before_one
        for before_one, after_one in zip(_influence(metric, a, before), _influence(metric, b, after), strict=True)
    ]
    # The number of documents of equal weight that would tell as much (Kish).
    effective = total**2 / sum(weight**2 for weight in weights)
    degrees = math.floor(effective - 1 + 1e-9)
    if n == 1:
        return Difference(before, after, None, None, None, None, n, T_TEST)
    left_out = [one / (1 - weight / total) for one, weight in zip(influence, weights, strict=True)]
    stderr = math.sqrt(sum(one**2 for one in left_out) * (n - 1) / n)
    if degrees < 1:
        return Difference(before, after, stderr, None, None, None, n, T_TEST)
    value, half = after - before, t_quantile(degrees) * stderr
    p = t_test(value / stderr, degrees) if stderr else 1.0 if not value else 0.0
    return Difference(before, after, stderr, value - half, value + half, p, n, T_TEST, stderr)


def _influence(metric: str, items: Sequence[WeightedSum], value: float) -> list[float]:
    """Change of the metric with each document, to first order."""
    total = sum(weight for _, weight in items)
    mean = sum(one for one, _ in items) / total
    slope = -1 / math.log(2) if metric == "bits_per_byte" else -value if is_perplexity(metric) else 1.0
    return [slope * (one - mean * weight) / total for one, weight in items]


def score_interval(more: int, less: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two proportions of the same n documents, at least two of them.

    more, less: documents where only the one, and only the other, is a hit.
    """
    value = (more - less) / n

    def score(difference: float) -> float:
        """Score statistic of this true difference; falls as the difference grows."""
        linear = (2 * n - more + less) * difference - more - less
        root = math.sqrt(max(linear**2 + 8 * n * less * difference * (1 - difference), 0.0))
        discordant = (root - linear) / (2 * n) + difference * (1 - difference)
        distance = more - less - n * difference
        if discordant < 1e-15:
            return math.copysign(math.inf, distance)
        return distance / math.sqrt(n * discordant) * math.sqrt((n - 1) / n)

    def crossing(low: float, high: float, level: float) -> float:
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > level else (low, middle)
        return (low + high) / 2

    return (-1.0 if value <= -1 else crossing(-1.0, value, Z), 1.0 if value >= 1 else crossing(value, 1.0, -Z))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided mid-p value: each of the documents on which they differ is as likely to favour the one as the other."""
    total, fewer = only_a + only_b, min(only_a, only_b)
    if only_a == only_b:
        return 1.0

    def probability(count: int) -> float:
        ways = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
        return math.exp(ways - total * math.log(2))

    return min(2 * sum(map(probability, range(fewer + 1))) - probability(fewer), 1.0)


def t_test(statistic: float, degrees: int) -> float:
    """Two-sided p value of Student's t distribution (Abramowitz and Stegun 26.7.3, 26.7.4; 26.7.8 beyond 200 degrees)."""
    if degrees > 200:
        normal = abs(statistic) * (1 - 1 / (4 * degrees)) / math.sqrt(1 + statistic**2 / (2 * degrees))
        return math.erfc(normal / math.sqrt(2))
    angle = math.atan(abs(statistic) / math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    series = 0.0
    for power in range(2 + odd, degrees + 1, 2):
        series += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    inside = (angle + math.sin(angle) * series) * 2 / math.pi if odd else math.sin(angle) * series
    return max(1 - inside, 0.0)


@cache
def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t distribution."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_test(middle, degrees) > 0.05 else (low, middle)
    return (low + high) / 2
