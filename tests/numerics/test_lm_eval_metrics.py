"""Filters, metrics and their standard errors beside lm-evaluation-harness's own functions, on made-up answers."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from llmtrain.eval.lm_eval_tasks.aggregation import AGGREGATIONS, aggregate
from llmtrain.eval.lm_eval_tasks.filters import FILTERS, read_filters
from llmtrain.eval.lm_eval_tasks.metrics import exact_match

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

ANSWERS = [
    *(
        "",
        " ",
        "The answer is (B).",
        "the answer is 12,000.",
        "#### 7",
        "####  $1.50 #### 3",
        "A",
        " b) or C",
        "Answer: D\n",
    ),
    *(
        "Guilty of Romance",
        "guilty",
        "İSTANBUL",
        "x [C]",
        "('the', 'DET'), ('cat', 'NOUN')",
        "['x', 'y']",
        "(A) (B) (C)",
    ),
    *("Person: Ann, Bob $$ Location: None", "DATE: 3 May\norganization: ACME, none", "no 42 here", "¿Sí?", "1\n2\n3"),
]
RECORDS = [{"choices": ["Guilty", "Guilty of Romance", "cat!", "42"]}, {"choices": ["Yes", "a.b", "ACME", "sí"]}]

FILTERS_TO_TRY: list[dict[str, Any]] = [
    *({"function": name} for name in ("remove_whitespace", "lowercase", "uppercase", "majority_vote", "take_first")),
    {"function": "take_first_k", "k": 2},
    {"function": "map", "mapping_dict": {"A": 1, "": 2}, "default_value": -1},
    {"function": "regex"},
    {"function": "regex", "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1, "fallback": "none"},
    {"function": "regex", "regex_pattern": r"(x)?(y)?", "group_select": 0},
    {"function": "regex", "regex_pattern": "[A-D]"},
    {"function": "multi_choice_regex", "regex_pattern": r"(\([A-Z]\))"},
    {"function": "multi_choice_regex", "regex_pattern": "(nothing)", "ignore_case": True, "ignore_punctuation": True},
    {"function": "multi_choice_regex", "group_select": -1, "regexes_to_ignore": ["[.]"], "fallback": "?"},
    {"function": "regex_pos"},
    {"function": "format_span"},
]


@pytest.mark.parametrize("settings", FILTERS_TO_TRY, ids=lambda one: one["function"])
def test_filters(settings):
    from lm_eval.filters import build_filter_ensemble

    rng = random.Random(0)
    answers = [[rng.choice(ANSWERS) for _ in range(3)] for _ in range(60)] + [[one] * 3 for one in ANSWERS]
    records = [rng.choice(RECORDS) for _ in answers]
    [chain] = read_filters([{"name": "it", "filter": [settings]}], "generate_until", repeats=3)
    arguments = {name: value for name, value in settings.items() if name != "function"}
    [theirs] = build_filter_ensemble("it", [(settings["function"], arguments)]).filters
    assert chain.apply(answers, records) == list(theirs().apply(answers, records))


def test_every_filter_is_tried():
    assert {one["function"] for one in FILTERS_TO_TRY} == set(FILTERS)


@pytest.mark.parametrize("options", [{}, {"ignore_case": True}, {"ignore_punctuation": True, "ignore_numbers": True}])
@pytest.mark.parametrize("ignored", [None, [r"\s", "(?s).*#### "]])
def test_exact_match(options, ignored):
    from lm_eval.api.metrics import exact_match_hf_evaluate

    options = options | {"regexes_to_ignore": ignored}
    for given in ANSWERS:
        for right in (*ANSWERS, "istanbul", "i̇stanbul", "the answer is b", "7"):
            expected = exact_match_hf_evaluate([given], [right], **options)["exact_match"]
            assert exact_match([given], [right], **options) == expected, (given, right)


def numbers(rng: random.Random) -> list[Any]:
    return [rng.random() for _ in range(40)]


def weighted(rng: random.Random) -> list[Any]:
    return [(-rng.random() * 9, rng.randint(1, 9)) for _ in range(40)]


def labels(rng: random.Random) -> list[Any]:
    return [(rng.randrange(2), rng.randrange(2)) for _ in range(40)]


def chances(rng: random.Random) -> list[Any]:
    return [(rng.randrange(3), [0.2, 0.5, 0.3]) for _ in range(40)]


def texts(rng: random.Random) -> list[Any]:
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "old", "dogs", "barked"]
    pairs = [[" ".join(rng.choice(words) for _ in range(9)) for _ in range(2)] for _ in range(12)]
    return [(gold, f"{gold[:20]} {answer}") for gold, answer in pairs]


ITEMS = {
    **dict.fromkeys(("mean", "nanmean", "median", "perplexity", "bypass"), numbers),
    **dict.fromkeys(("weighted_perplexity", "bits_per_byte"), weighted),
    **dict.fromkeys(("f1", "matthews_corrcoef"), labels),
    **dict.fromkeys(("bleu", "chrf", "chrf++", "ter"), texts),
    "brier_score": chances,
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregations(name):
    from lm_eval.api.registry import get_aggregation

    items = ITEMS[name](random.Random(1))
    function = get_aggregation(name)
    assert function is not None
    assert aggregate("it", name, items).value == pytest.approx(function(items), rel=1e-12)


@pytest.mark.parametrize(
    "name", ["mean", "median", "nanmean", "f1", "matthews_corrcoef", "bleu", "chrf", "chrf++", "ter"]
)
def test_standard_errors(name, monkeypatch):
    """As of so many draws of the harness."""
    from lm_eval.api import metrics
    from lm_eval.api.registry import get_aggregation

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    items = ITEMS[name](random.Random(2))
    draws = 100 if name in ("bleu", "chrf", "chrf++", "ter") else 1000
    function = metrics.stderr_for_metric(get_aggregation(name), draws)  # type: ignore[arg-type]
    assert function is not None
    assert aggregate("it", name, items).stderr == pytest.approx(function(items), rel=1e-9)


def test_correlation_and_f1_of_rare_labels():
    from sklearn.metrics import f1_score
    from sklearn.metrics import matthews_corrcoef as correlation

    for items in ([(0, 0)] * 3, [(1, 1)] * 3, [(0, 1)] * 3, [(1, 0)], [(0, 2), (1, 1), (2, 0), (2, 2), (0, 0)]):
        golds, chosen = zip(*items, strict=True)
        assert aggregate("it", "matthews_corrcoef", items).value == pytest.approx(correlation(golds, chosen))
        if max(golds) < 2:
            assert aggregate("it", "f1", items).value == pytest.approx(float(f1_score(golds, chosen)))
