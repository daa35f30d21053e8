"""Metrics of lm-evaluation-harness 0.4.13: what a document gives to each (`metric_list`)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.aggregation import (
    AGGREGATIONS,
    LABELS,
    LIKELIHOODS,
    NUMBER,
    PROBABILITIES,
    TEXTS,
    WEIGHTED,
    check_library,
    takes,
)
from llmtrain.eval.lm_eval_tasks.code import load_function
from llmtrain.eval.lm_eval_tasks.filters import check_patterns
from llmtrain.eval.lm_eval_tasks.yaml_file import Function


@dataclass(frozen=True)
class _Known:
    """A metric: what a document gives, by output type, and its aggregation."""

    kinds: Mapping[str, str]
    aggregation: str
    higher_is_better: bool = True


_CHOICE = {"multiple_choice": NUMBER}
_TEXT = {"generate_until": TEXTS}
_ROLLING = {"loglikelihood_rolling": WEIGHTED}
METRICS = {
    "acc": _Known({**_CHOICE, "loglikelihood": NUMBER, **_TEXT}, "mean"),
    "acc_norm": _Known({**_CHOICE, **_TEXT}, "mean"),
    "acc_bytes": _Known({**_CHOICE, **_TEXT}, "mean"),
    "acc_mutual_info": _Known(_CHOICE, "mean"),
    "exact_match": _Known({**_CHOICE, "generate_until": NUMBER}, "mean"),
    "f1": _Known({"multiple_choice": LABELS, **_TEXT}, "f1"),
    "mcc": _Known({"multiple_choice": LABELS, **_TEXT}, "matthews_corrcoef"),
    "brier_score": _Known({"multiple_choice": PROBABILITIES}, "brier_score", False),
    "likelihood": _Known({"multiple_choice": LIKELIHOODS}, "mean"),
    "perplexity": _Known({"loglikelihood": NUMBER}, "perplexity", False),
    "word_perplexity": _Known(_ROLLING, "weighted_perplexity", False),
    "byte_perplexity": _Known(_ROLLING, "weighted_perplexity", False),
    "bits_per_byte": _Known(_ROLLING, "bits_per_byte", False),
    "bleu": _Known(_TEXT, "bleu"),
    "chrf": _Known(_TEXT, "chrf"),
    "chrf++": _Known(_TEXT, "chrf++"),
    "ter": _Known(_TEXT, "ter", False),
    "bypass": _Known({"generate_until": NUMBER}, "bypass"),
}
_DEFAULTS = {
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "multiple_choice": ("acc", "acc_norm"),
    "generate_until": ("exact_match",),
}
_EXACT_MATCH = ("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers")


@dataclass(frozen=True)
class MetricSettings:
    """One entry of `metric_list`. function: code that computes it. arguments: its further settings."""

    name: str
    aggregation: str | Function
    higher_is_better: bool
    function: Function | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_metrics(given: Any, output_type: str, own_results: bool) -> tuple[MetricSettings, ...]:
    """Entries of a task's `metric_list`, or the defaults of its output type.

    own_results: the task computes its metrics by process_results, so that any name goes. Raises EvalError with the key and
    the name of what there is not, and for an aggregation that cannot be taken of the metric.
    """
    if given is None:
        given = [{"metric": name} for name in _DEFAULTS[output_type]]
    if not given:
        raise EvalError("metric_list: empty; nothing would be measured")
    made = []
    for number, entry in enumerate(given):
        key = f"metric_list.{number}"
        if not isinstance(entry, dict) or "metric" not in entry:
            raise EvalError(f"{key}: expected a mapping with `metric`, found {entry!r}")
        one = _read(key, entry, output_type, own_results)
        if one is not None:
            made.append(one)
    return tuple(made)


def _read(key: str, entry: Mapping[str, Any], output_type: str, own_results: bool) -> MetricSettings | None:
    metric, aggregation = entry["metric"], entry.get("aggregation")
    function = metric if isinstance(metric, Function) else None
    if function is not None and own_results:
        return None  # process_results computes everything; the harness never calls this function
    name = function.reference.rpartition(".")[2] if function is not None else metric
    known = METRICS.get(name) if isinstance(name, str) else None
    if aggregation is None and known is not None:
        aggregation = known.aggregation
    if aggregation is None or not isinstance(aggregation, str | Function):
        raise EvalError(f"{key}: {name} needs an aggregation; {suggest(str(aggregation), AGGREGATIONS, 'there are')}")
    if isinstance(aggregation, str) and aggregation not in AGGREGATIONS:
        raise EvalError(
            f"{key}: there is no aggregation '{aggregation}'; {suggest(aggregation, AGGREGATIONS, 'there are')}"
        )
    arguments = {
        name: value
        for name, value in entry.items()
        if name not in ("metric", "aggregation", "higher_is_better", "hf_evaluate")
    }
    higher = entry.get("higher_is_better", known is None or known.higher_is_better)
    made = MetricSettings(str(name), aggregation, bool(higher), function, arguments)
    if not own_results and function is None:
        _check(key, made, output_type, bool(entry.get("hf_evaluate")))
    if isinstance(aggregation, str):
        check_library(f"{key}: {name}", aggregation)
    return made


def _check(key: str, metric: MetricSettings, output_type: str, hf_evaluate: bool) -> None:
    name = metric.name
    if hf_evaluate and output_type == "generate_until" and name != "exact_match":
        raise EvalError(f"{key}: {name} of the `evaluate` library (hf_evaluate) is not supported")
    names = [other for other, known in METRICS.items() if output_type in known.kinds]
    if name not in names:
        raise EvalError(
            f"{key}: there is no metric '{name}' of a {output_type} task; {suggest(name, names, 'there are')}"
        )
    if name == "exact_match" and output_type == "generate_until":
        for setting in metric.arguments:
            if setting not in _EXACT_MATCH:
                raise EvalError(f"{key}: exact_match has no setting '{setting}'; {suggest(setting, _EXACT_MATCH)}")
        check_patterns(f"{key}: regexes_to_ignore", metric.arguments.get("regexes_to_ignore"))
    kind = METRICS[name].kinds[output_type]
    if isinstance(metric.aggregation, str) and not takes(metric.aggregation, kind):
        raise EvalError(
            f"{key}: {metric.aggregation} cannot be taken of {name}, which is {kind} of each document "
            "(lm-evaluation-harness fails at it too)"
        )


# Metrics of one document


def choice_values(
    results: Sequence[tuple[float, bool]], choices: Sequence[str], gold: Any, several_right: bool, names: Sequence[str]
) -> dict[str, Any]:
    """Values of a multiple_choice document.

    results: (log-likelihood, greedy) of every choice; for acc_mutual_info then of every choice without its context. gold:
    index or text of the right choice, or indices if several_right. An index outside of the choices makes every choice wrong.
    """
    likelihoods = np.array([likelihood for likelihood, _ in results], float)
    alone, likelihoods = likelihoods[len(choices) :], likelihoods[: len(choices)]
    greedy = [greedy for _, greedy in results]
    gold = right_choice(gold, choices, several_right)

    def right(scores: Any) -> float:
        chosen = int(np.argmax(scores))
        return float(chosen in gold if several_right else chosen == gold)

    with np.errstate(divide="ignore", invalid="ignore"):
        by_length = likelihoods / np.array([float(len(choice)) for choice in choices])
        by_bytes = likelihoods / np.array([float(len(choice.encode())) for choice in choices])
    exact = [greedy[one] for one in (gold if several_right else [gold]) if one != _NO_CHOICE]
    exponentials = np.exp(likelihoods - likelihoods.max())
    values: dict[str, Any] = {
        "acc": right(likelihoods),
        "f1": (gold, int(np.argmax(likelihoods))),
        "mcc": (gold, int(np.argmax(likelihoods))),
        "acc_norm": right(by_length),
        "acc_bytes": right(by_bytes),
        "exact_match": int(any(exact)),
        "brier_score": (gold, exponentials / exponentials.sum()),
        "likelihood": (gold, likelihoods.tolist()),
    }
    if len(alone):
        values["acc_mutual_info"] = right(likelihoods - alone)
    return {name: values[name] for name in names if name in values}


_NO_CHOICE = -100


def right_choice(gold: Any, choices: Sequence[str], several_right: bool) -> Any:
    """Index of the right choice of a multiple_choice document, a list of them if several_right; _NO_CHOICE for one that is not
    among the choices. gold: as of `choice_values`. Raises EvalError for a value of another kind."""
    if isinstance(gold, list) != several_right:
        raise EvalError(f"`doc_to_target` gives {gold!r}, but that of the first document is of another kind")
    if isinstance(gold, str):
        return choices.index(gold) if gold in choices else _NO_CHOICE
    numbers = gold if isinstance(gold, list) else [gold]
    if not all(isinstance(one, int) for one in numbers):
        wanted = "the numbers of choices" if several_right else "the number or the text of a choice"
        raise EvalError(f"`doc_to_target` gives {gold!r}; expected {wanted}")
    found = [one if one < len(choices) else _NO_CHOICE for one in numbers]
    return found if several_right else found[0]


def likelihood_values(result: Any, text: str, names: Sequence[str]) -> dict[str, Any]:
    """Values of a loglikelihood document, result: (log-likelihood, greedy); or of a whole text, result: its log-likelihood."""
    if isinstance(result, tuple):
        likelihood, greedy = result
        values: dict[str, Any] = {"perplexity": likelihood, "acc": int(greedy)}
    else:
        words, count = len(re.split(r"\s+", text)), len(text.encode())
        values = {
            "word_perplexity": (result, words),
            "byte_perplexity": (result, count),
            "bits_per_byte": (result, count),
        }
    return {name: values[name] for name in names if name in values}


def text_values(
    answer: Any, gold: Any, several_right: bool, metrics: Sequence[MetricSettings]
) -> dict[str, tuple[Any, MetricSettings]]:
    """Values of a generate_until document, each with the entry of `metric_list` that has given it.

    answer: the filtered answer, or a list of them where no filter takes one. gold: the right answer; with several_right a
    list, of which one suffices. A function of code may return several metrics.
    """
    values: dict[str, tuple[Any, MetricSettings]] = {}
    for metric in metrics:
        if several_right and metric.function is None and metric.name == "exact_match":
            found: Any = float(exact_match([answer] * len(gold), gold, **metric.arguments) > 0)
        elif several_right and metric.function is None and metric.name != "bypass":
            raise EvalError(
                f"{metric.name} of a document with several right answers (doc_to_target is a list) is not defined; "
                "lm-evaluation-harness fails at it too"
            )
        elif several_right:
            scores = [_scored(metric, one, answer) for one in gold]
            found = float(any(one[metric.name] if isinstance(one, Mapping) else one for one in scores))
        else:
            found = _scored(metric, gold, answer)
        named = found if isinstance(found, Mapping) else {metric.name: found}
        values |= {name: (value, metric) for name, value in named.items()}
    return values


def _scored(metric: MetricSettings, gold: Any, answer: Any) -> Any:
    if metric.function is None:
        if metric.name == "exact_match":
            return exact_match([answer], [gold], **metric.arguments)
        return None if metric.name == "bypass" else (gold, answer)
    function = load_function(metric.function)
    try:
        return function(references=[gold], predictions=[answer], **metric.arguments)
    except TypeError:
        return function([gold, answer])


def exact_match(
    predictions: list[Any],
    references: list[Any],
    regexes_to_ignore: Sequence[str] | None = None,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_numbers: bool = False,
) -> float:
    """Share of predictions that equal their reference after the same clean-up of both.

    In NumPy's arrays of texts, as in the harness: there a capital letter whose small one is longer (Turkish dotted I) loses its
    last character if the text is the longest.
    """

    def clean(texts: list[Any]) -> Any:
        for pattern in regexes_to_ignore or ():
            texts = [re.sub(pattern, "", text) for text in texts]
        made: Any = np.asarray(texts)
        if ignore_case:
            made = np.char.lower(made)
        for remove, marks in ((ignore_punctuation, string.punctuation), (ignore_numbers, string.digits)):
            if remove:
                made = np.char.translate(made, str.maketrans("", "", marks))  # type: ignore[arg-type]
        return made

    return float(np.mean(clean(predictions) == clean(references)))
