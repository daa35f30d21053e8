"""Paired differences: known values, and 95 % intervals that cover a known difference in 95 % of simulated pairs of results."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmtrain.eval.compare.statistics import (
    Difference,
    combined,
    mcnemar,
    paired_difference,
    score_interval,
    t_quantile,
    t_test,
)

PAIRS = 1000
Random = np.random.Generator


def hits(rng: Random, a: float, b: float, correlation: float, n: int) -> Difference:
    """n documents of which the models get the shares a and b right, with this correlation between their answers."""
    both = a * b + correlation * math.sqrt(a * (1 - a) * b * (1 - b))
    assert max(a + b - 1, 0) <= both <= min(a, b)
    kind = rng.choice(4, size=n, p=[both, a - both, b - both, 1 - a - b + both])
    return paired_difference(
        "acc", [(float(one in (0, 1)), 1.0) for one in kind], [(float(one in (0, 2)), 1.0) for one in kind]
    )


def texts(rng: Random, metric: str, loss: float, gain: float, n: int, spread: float) -> Difference:
    """n texts of unequal length (log-normal), with losses per unit that the models share by half."""
    lengths = np.ceil(200 * np.exp(spread * rng.standard_normal(n)))
    shared, own_a, own_b = 0.5 * rng.standard_normal((3, n))
    a, b = -(loss + shared + own_a) * lengths, -(loss - gain + shared + own_b) * lengths
    pair = [[(float(one), float(length)) for one, length in zip(side, lengths, strict=True)] for side in (a, b)]
    return paired_difference(metric, *pair)


def coverage(simulate: Callable[[Random], Difference], truth: float) -> float:
    rng = np.random.default_rng(0)
    found = [simulate(rng) for _ in range(PAIRS)]
    return sum(one.low is not None and one.low <= truth <= (one.high or 0.0) for one in found) / PAIRS


@pytest.mark.parametrize(
    ("a", "b", "correlation", "n"),
    [
        (0.5, 0.6, 0.0, 30),
        (0.5, 0.6, 0.6, 30),
        (0.7, 0.4, 0.3, 30),
        (0.25, 0.28, 0.2, 400),
        (0.6, 0.6, 0.8, 400),
        (0.02, 0.06, 0.3, 200),
        (0.99, 0.94, 0.2, 200),
    ],
)
def test_intervals_of_accuracies_cover(a, b, correlation, n):
    assert 0.93 <= coverage(lambda rng: hits(rng, a, b, correlation, n), b - a) <= 0.97


def test_intervals_of_few_documents_near_0_and_1_cover_at_least():
    """Hardly any document differs, so that counts are too coarse for 95 %; a t interval would cover 37 % and 75 %."""
    assert coverage(lambda rng: hits(rng, 0.01, 0.015, 0.0, 30), 0.005) >= 0.93
    assert coverage(lambda rng: hits(rng, 0.99, 0.95, 0.1, 30), -0.04) >= 0.93


@pytest.mark.parametrize("n", [30, 300])
@pytest.mark.parametrize(("spread", "gain"), [(0.0, 0.05), (1.0, 0.05), (1.5, 0.4)])
def test_intervals_of_perplexities_cover(n, spread, gain):
    truth = math.exp(3 - gain) - math.exp(3)
    assert 0.93 <= coverage(lambda rng: texts(rng, "word_perplexity", 3.0, gain, n, spread), truth) <= 0.97


def test_intervals_of_bits_and_of_scores_between_0_and_1_cover():
    assert 0.93 <= coverage(lambda rng: texts(rng, "bits_per_byte", 0.9, 0.1, 30, 0.7), -0.1 / math.log(2)) <= 0.97

    def overlap(rng: Random) -> Difference:  # as F1 scores: many zeros, and fractions
        easy, a, b = rng.random((3, 60))
        first, second = np.clip(easy + a - 0.8, 0, 1), np.clip(easy + b - 0.7, 0, 1)
        return paired_difference("f1", [(x, 1.0) for x in first.tolist()], [(x, 1.0) for x in second.tolist()])

    rng = np.random.default_rng(1)
    easy, noise = rng.random((2, 4_000_000))
    truth = float(np.clip(easy + noise - 0.7, 0, 1).mean() - np.clip(easy + noise - 0.8, 0, 1).mean())
    assert 0.93 <= coverage(overlap, truth) <= 0.97


@pytest.mark.parametrize(
    "parts",
    [
        [(0.5, 0.6, 0.3, 30, 1.0), (0.25, 0.3, 0.3, 100, 2.0), (0.8, 0.75, 0.5, 50, 0.5)],
        [(0.4, 0.5, 0.5, 40, math.log2(40))] * 6,
        [(0.04, 0.09, 0.2, 150, 1.0), (0.95, 0.9, 0.2, 150, 3.0)],
    ],
)
def test_intervals_of_weighted_averages_cover(parts):
    total = sum(weight for *_, weight in parts)
    truth = sum((b - a) * weight for a, b, *_, weight in parts) / total

    def simulate(rng: Random) -> Difference:
        return combined([(hits(rng, a, b, correlation, n), weight) for a, b, correlation, n, weight in parts])

    assert 0.93 <= coverage(simulate, truth) <= 0.97


@pytest.mark.parametrize("kind", ["accuracies", "perplexities", "averages"])
def test_equal_models_are_distinguished_in_five_percent_of_cases(kind):
    rng = np.random.default_rng(2)
    simulate = {
        "accuracies": lambda: hits(rng, 0.5, 0.5, 0.5, 100),
        "perplexities": lambda: texts(rng, "word_perplexity", 3.0, 0.0, 30, 1.0),
        "averages": lambda: combined([(hits(rng, 0.3, 0.3, 0.3, 50), 1.0), (hits(rng, 0.7, 0.7, 0.3, 80), 2.0)]),
    }[kind]
    values = [simulate().p or 0.0 for _ in range(PAIRS)]
    assert 0.03 <= np.mean(np.array(values) < 0.05) <= 0.07


def test_published_values():
    # Fagerland, Lydersen and Laake 2013, table 1: 1 and 7 discordant pairs.
    assert mcnemar(1, 7) == pytest.approx(0.0391, abs=5e-5)
    assert t_quantile(1) == pytest.approx(12.7062, abs=5e-5) and t_quantile(29) == pytest.approx(2.0452, abs=5e-5)
    assert t_test(3.0, 10) == pytest.approx(0.013344, abs=5e-7) and t_test(3.0, 1000) == pytest.approx(
        0.002767, abs=5e-7
    )


@pytest.mark.parametrize(("more", "less", "n"), [(12, 2, 50), (5, 0, 30), (0, 1, 8), (40, 30, 71)])
def test_ends_of_the_score_interval(more, less, n):
    """At both ends the distance to what was counted is 1.96 standard errors of the likeliest model with that difference."""
    for end in score_interval(more, less, n):
        fewer = np.linspace(
            max(-end, 0) + 1e-9, (1 - end) / 2 - 1e-9, 400_001
        )  # share of `less`; that of `more` is + end
        likelihood = more * np.log(fewer + end) + less * np.log(fewer) + (n - more - less) * np.log1p(-2 * fewer - end)
        variance = n * (2 * fewer[likelihood.argmax()] + end - end**2) * n / (n - 1)
        assert abs(more - less - n * end) / math.sqrt(variance) == pytest.approx(1.96, abs=0.002)


def test_numbers_of_documents_at_the_edge():
    nothing = paired_difference("acc", [(1.0, 1.0)] * 30, [(1.0, 1.0)] * 30)
    assert (nothing.value, nothing.stderr, nothing.p) == (0.0, 0.0, 1.0)
    assert nothing.low == pytest.approx(-0.1170, abs=1e-4) and nothing.high == pytest.approx(0.1170, abs=1e-4)
    everything = paired_difference("acc", [(0.0, 1.0)] * 8, [(1.0, 1.0)] * 8)
    assert everything.high == 1.0 and 0.25 < (everything.low or 0) < 1 and (everything.p or 1) < 0.01
    one = paired_difference("acc", [(0.0, 1.0)], [(1.0, 1.0)])
    assert one.value == 1.0 and one.stderr is None and one.low is None
    text = paired_difference("word_perplexity", [(-30.0, 10.0)], [(-20.0, 10.0)])
    assert text.value < 0 and text.low is None and text.p is None
    assert combined([(one, 1.0), (text, 1.0)]).low is None
    unequal = paired_difference("bits_per_byte", [(-30.0, 10.0), (-9.0, 4.0)], [(-20.0, 10.0), (-8.0, 4.0)])
    assert unequal.stderr is not None and unequal.low is None, "less than two documents' worth"


def test_equal_contributions_do_not_matter():
    """The difference of two ratios is that of log-likelihoods: what both models share cancels."""
    rng = np.random.default_rng(3)
    shared, gain = rng.normal(-3, 2, 50), rng.normal(0.1, 0.01, 50)
    a = [(float(one), 1.0) for one in shared]
    b = [(float(one + more), 1.0) for one, more in zip(shared, gain, strict=True)]
    found = paired_difference("bits_per_byte", a, b)
    assert found.stderr == pytest.approx(gain.std(ddof=1) / math.sqrt(50) / math.log(2))
    assert (found.p or 0) < 1e-12 and (found.high or 0) < 0
