"""Metrics against numbers computed by hand: normalisations, standard errors, exact match."""

import math
import statistics
from typing import Any

import pytest

from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood
from llmtrain.eval.report.filters import apply_filters
from llmtrain.eval.report.metrics import DocumentMetrics, Estimate, WeightedSum, aggregate, estimate
from llmtrain.eval.report.process_results import foundry_exact_match, lm_eval_exact_match, normalize, process_results
from llmtrain.eval.tasks.documents import Choices, Content, Continuation, Document, Question, Schema, Text
from llmtrain.eval.tasks.filters import Extract
from llmtrain.eval.tasks.sections import FoundryPrompting, LmEvalPrompting

FOUNDRY, LM_EVAL = FoundryPrompting(), LmEvalPrompting()


def document_metrics(content: Content, results: Any, settings: Any = LM_EVAL) -> DocumentMetrics:
    return process_results(Document(0, "x:1", content), results, settings)


def test_every_normalisation_of_one_pass_can_choose_differently():
    choices = Choices("q", ("ab", "äöü", "abcdefgh", "abcde"), 0)
    likelihoods, tokens = [-2.0, -2.7, -5.0, -4.5], [1, 2, 10, 3]
    alone = [-1.0, -2.0, -4.0, -9.0]
    results = [Loglikelihood(one, False, count) for one, count in zip(likelihoods, tokens, strict=True)]
    results += [Loglikelihood(one, False, 1) for one in alone]
    made = document_metrics(choices, results)
    assert made.details["chosen"] == {"sum": 0, "per_token": 2, "per_char": 2, "per_byte": 1, "pmi": 3}
    assert made.values["acc_sum"] == (1.0, 1.0)
    assert made.values["acc_pmi"] == (0.0, 1.0)


def test_the_first_of_equals_wins():
    made = document_metrics(Choices("q", ("aa", "bb"), 1), [Loglikelihood(-1.0, False, 1)] * 2)
    assert made.details["chosen"]["sum"] == 0


def test_a_schemas_lengths_depend_on_the_convention():
    schema = Schema(("a long context", "short"), "rest", 0)
    results = [Loglikelihood(-5.0, False, 2), Loglikelihood(-4.0, False, 2)]
    assert document_metrics(schema, results, FOUNDRY).details["chosen"]["per_char"] == 1
    assert document_metrics(schema, results, LM_EVAL).details["chosen"]["per_char"] == 0  # divides by 14 and 5


def test_results_that_do_not_fit_the_document_are_a_programming_error():
    with pytest.raises(AssertionError):
        document_metrics(Choices("q", ("a", "b"), 0), [Loglikelihood(-1.0, False, 1)] * 3)


def test_continuations_and_texts():
    made = document_metrics(Continuation("a", "b"), [Loglikelihood(-3.0, True, 2, truncated=5)])
    assert made.values == {"acc": (1.0, 1.0), "perplexity": (-3.0, 1.0), "token_perplexity": (-3.0, 2.0)}
    assert made.truncated == 1
    made = document_metrics(Text("zwei Wörter"), [Loglikelihood(-3.0, False, 2), Loglikelihood(-1.0, False, 1)])
    assert made.values["token_perplexity"] == (-4.0, 3.0)
    assert made.values["word_perplexity"] == (-4.0, 2.0)
    assert made.values["bits_per_byte"] == (-4.0, 12.0)


def test_estimates():
    hits: list[WeightedSum] = [(float(i % 3 == 0), 1.0) for i in range(10)]
    values = [hit for hit, _ in hits]
    made = estimate("acc", hits)
    assert made.value == pytest.approx(0.4)
    assert made.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(10))
    assert estimate("acc", hits[:1]) == Estimate(1.0, None)
    texts: list[WeightedSum] = [(-10.0, 4.0), (-30.0, 16.0)]
    assert estimate("word_perplexity", texts).value == pytest.approx(math.exp(2))
    assert estimate("bits_per_byte", texts).value == pytest.approx(2 / math.log(2))
    assert math.isfinite(estimate("perplexity", [(-1e6, 1.0)]).value)


def test_categories_count_alike_or_by_size():
    def one(category: str, hit: float) -> DocumentMetrics:
        return DocumentMetrics(0, category, {"acc": (hit, 1.0)}, {}, 0)

    some = [one("a", 1.0), one("a", 1.0), one("b", 0.0), one("b", 1.0), one("b", 0.0), one("b", 0.0)]
    values, categories = aggregate(some, ["acc"], macro=True)
    assert values["acc"].value == pytest.approx((1.0 + 0.25) / 2)
    assert {name: part["acc"].value for name, part in categories.items()} == {"a": 1.0, "b": 0.25}
    b = statistics.stdev([0, 1, 0, 0])
    assert values["acc"].stderr == pytest.approx(b / 2 / 2)
    values, _ = aggregate(some, ["acc"], macro=False)
    assert values["acc"].value == pytest.approx(0.5)
    assert values["acc"].stderr == pytest.approx(math.sqrt(3 * b**2 / (6 - 2) / 6))  # pooled variance over n


@pytest.mark.parametrize(
    ("text", "clean"),
    [("The  Beatles!", "beatles"), ("a_b, An apple", "b apple"), ("O’Hara’s", "o hara s"), ("Athens", "athens")],
)
def test_trivia_normalisation(text, clean):
    assert normalize(text) == clean


@pytest.mark.parametrize(
    ("text", "settings", "right"),
    [
        (" the Mark, a coin", {}, True),
        ("a note: Mark", {}, False),
        ("markup", {}, True),  # a prefix is enough
        ("Mark.", {"normalize": False}, True),
        (" mark", {"normalize": False}, False),
        ("so 4 #### Mark", {"cot_delimiter": " #### "}, True),
        ("Mark #### 4", {"cot_delimiter": " #### "}, False),
        ("no\nMark", {"stops": ["\n"]}, False),
    ],
)
def test_foundry_answers(text, settings, right):
    question = Question("q", "Mark", ("the coin",))
    assert foundry_exact_match(text, question, FoundryPrompting(**settings)) == {"exact_match": right}


@pytest.mark.parametrize(
    ("text", "settings", "right"),
    [
        ("Mark", {}, True),
        (" Mark", {}, False),
        (" Mark ", {"strip": True}, True),
        ("mark", {"ignore_case": True}, True),
        ("M.a.rk!", {"ignore_punctuation": True}, True),
        ("$Mark", {"ignore": ["\\$"]}, True),
        ("Mark, and more", {"stops": [","]}, True),
        ("the coin", {}, True),
        ("Markup", {}, False),
    ],
)
def test_lm_eval_answers(text, settings, right):
    question = Question("q", "Mark", ("the coin",))
    assert lm_eval_exact_match(text, question, LmEvalPrompting(**settings)) == {"exact_match": right}


def test_answers_are_taken_out_by_regular_expressions():
    last = Extract(pattern="(-?[$0-9.,]{2,})|(-?[0-9]+)", match=-1)
    for text, rule, answer in (
        ("has 3, or 12. So 7", last, "7"),
        ("none", last, "[invalid]"),
        ("#### 1,200 ", Extract(pattern="#### ([0-9,]+)"), "1,200"),
        ("a b", Extract(pattern="[a-z]", match=1), "b"),
        ("a b", Extract(pattern="[a-z]", match=2, otherwise="?"), "?"),
    ):
        assert apply_filters(text, [rule]) == answer, text
    made = document_metrics(
        Question("q", "so 5\n#### 5", ()),
        [GeneratedText("it is 5")],
        LmEvalPrompting(extract={"strict": [Extract(pattern="#### (\\d+)")], "last": [last]}, ignore=["(?s).*#### "]),
    )
    assert {name: value for name, (value, _) in made.values.items()} == {"strict": 0.0, "last": 1.0}
