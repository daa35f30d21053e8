"""Comparison of two models, from what both results keep of every document. Imports no torch."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config.report import suggest
from llmtrain.eval.compare.averages import gauntlet_differences, group_differences
from llmtrain.eval.compare.read import Key, Side, labels
from llmtrain.eval.compare.statistics import Difference, combined, paired_difference
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.document_scores import Line, contribution, excerpt, given_answer
from llmtrain.eval.report.results import style_text

Pair = tuple[Line, Line]

_NO_MATTER = {
    *("name", "out", "cache", "model", "models", "tasks", "gauntlet", "wandb"),
    *("max_batch_tokens", "share_prefixes", "dtype"),
    *("chat_template", "system_instruction", "fewshot_as_multiturn"),
}
"""Settings of a run on which no result depends, or whose difference the tables or the entries of its results show."""

_OF_ROWS = {
    *("model", "path", "task", "shots", "convention", "metric", "value", "stderr", "metrics", "categories"),
    *(
        "documents",
        "documents_file",
        "documents_xxh3_128",
        "skipped_documents",
        "requests",
        "asked",
        "seconds",
        "style",
    ),
    *("lower_is_better", "task_settings"),
}
"""Entries of a result that need no note where they differ."""


@dataclass(frozen=True)
class Answered:
    """A document on which the models differ. a, b: what each answered; log-likelihoods where there are any."""

    where: str
    prompt: str
    right: str
    a: str
    b: str
    log_likelihoods_a: list[float]
    log_likelihoods_b: list[float]


@dataclass(frozen=True)
class TaskComparison:
    """Differences of a task. metric: the one to quote. left_out: metrics that cannot be compared, with reasons.

    a_better, b_better: documents on which the models differ most. lower_is_better: metrics of which lower values are better,
    perplexities aside.
    """

    task: str
    shots: int
    metric: str
    metrics: dict[str, Difference]
    categories: dict[str, dict[str, Difference]]
    left_out: dict[str, str]
    a_better: list[Answered]
    b_better: list[Answered]
    lower_is_better: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        return title_of((self.task, self.shots))

    @property
    def headline(self) -> Difference:
        return self.metrics[self.metric]


@dataclass(frozen=True)
class Comparison:
    """Comparison of b with a, by their labels.

    groups: metrics of lm-evaluation-harness's groups; falling: of a group those of which lower values are better in all of its
    tasks, perplexities aside. gauntlet: averages and categories. notes: what else differs between the results.
    """

    a: str
    b: str
    convention: str
    tasks: list[TaskComparison]
    groups: dict[str, dict[str, Difference]] = field(default_factory=dict)
    gauntlet_name: str | None = None
    gauntlet: dict[str, Difference] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    falling: dict[str, frozenset[str]] = field(default_factory=dict)


def title_of(key: Key) -> str:
    return f"{key[0]} ({key[1]}-shot)"


def compare(a: Side, b: Side, *, tasks: Sequence[str] | None = None, examples: int = 5) -> Comparison:
    """Compare what both have. tasks: names of those that count. examples: most documents shown of a task, for either model.

    Raises EvalError that lists every reason why the results cannot be compared.
    """
    if a.convention != b.convention:
        raise EvalError(
            f"{a.folder} is of convention {a.convention}, {b.folder} of {b.convention}: their prompts and scores differ; evaluate "
            f"one of the models again with convention={b.convention} or {a.convention}"
        )
    keys = _common(a, b, tasks)
    problems: list[str] = []
    compared: list[TaskComparison] = []
    for key in keys:
        try:
            compared.append(_compare_task(a, b, key, examples))
        except EvalError as error:
            problems.append(str(error))
    if problems:
        names = ",".join(dict.fromkeys(one.task for one in compared))
        remedy = f"\n--tasks {names} compares the others" if names else ""
        raise EvalError("\n".join(problems) + remedy)
    metrics = {(one.task, one.shots): one.metrics for one in compared}
    name, gauntlet, note = gauntlet_differences(a, b, metrics)
    groups, falling, group_notes = group_differences(a, b, metrics)

    def of_tasks(differing: Callable[[Side, Side, Key], Iterator[str]]) -> list[str]:
        """Notes, each with the tasks that it is on."""
        titles: dict[str, list[str]] = {}
        for key in keys:
            for note in differing(a, b, key):
                titles.setdefault(note, []).append(title_of(key))
        return [f"{note} ({', '.join(some)})." for note, some in titles.items()]

    notes = [
        *of_tasks(_differing_prompts),
        *of_tasks(_differing_tasks),
        *_only(a, b, keys, tasks),
        *_failed(a, b, tasks),
        *([note] if note else []),
        *group_notes,
        *(f"{note}." for note in _differing(a.settings, b.settings, _NO_MATTER)),
        *of_tasks(_differing_rows),
    ]
    notes += [
        f"{one.title}: {metric} is not compared: {reason}."
        for one in compared
        for metric, reason in one.left_out.items()
    ]
    return Comparison(*labels(a, b), a.convention, compared, groups, name, gauntlet, notes, falling)


def _common(a: Side, b: Side, tasks: Sequence[str] | None) -> list[Key]:
    """Tasks of both, in the order of a. Raises EvalError where there are none, and for unequal shots of a task."""
    known = list(dict.fromkeys(task for task, _ in (*a.rows, *b.rows)))
    for task in tasks or ():
        if task not in known:
            raise EvalError(f"--tasks {task}: neither result has it; {suggest(task, known, 'they have')}")
    wanted = [key for key in a.rows if tasks is None or key[0] in tasks]
    common = [key for key in wanted if key in b.rows]
    problems = []
    for task in dict.fromkeys(task for task, _ in wanted):
        shots = [sorted(count for name, count in side.rows if name == task) for side in (a, b)]
        if all(shots) and not set(shots[0]) & set(shots[1]):
            counts = [" and ".join(map(str, some)) for some in shots]
            problems.append(f"{task}: {counts[0]} examples (shots) in {a.folder}, {counts[1]} in {b.folder}")
    if problems:
        names = ",".join(dict.fromkeys(task for task, _ in common))
        remedy = f", or leave them out: --tasks {names}" if names else ""
        raise EvalError("\n".join(problems) + f"\nevaluate both with the same number of shots{remedy}")
    if not common:
        raise EvalError(
            f"nothing to compare: {a.folder} has {_titles(a.rows)}; {b.folder} has {_titles(b.rows)}"
            + (f"; of --tasks {','.join(tasks)}, no task is in both" if tasks else "")
        )
    return common


def _titles(keys: Iterable[Key]) -> str:
    return ", ".join(map(title_of, keys)) or "nothing"


def _only(a: Side, b: Side, common: Sequence[Key], tasks: Sequence[str] | None) -> list[str]:
    return [
        f"Only {label} has {_titles(missing)}."
        for label, side in zip(labels(a, b), (a, b), strict=True)
        if (missing := [key for key in side.rows if key not in common and (tasks is None or key[0] in tasks)])
    ]


def _failed(a: Side, b: Side, tasks: Sequence[str] | None) -> list[str]:
    return [
        f"{title} failed for {label}: {' '.join(reason.split())}"
        for label, side in zip(labels(a, b), (a, b), strict=True)
        for title, reason in side.failed.items()
        if tasks is None or any(title.startswith(f"{task} (") for task in tasks)
    ]


def _differing_prompts(a: Side, b: Side, key: Key) -> Iterator[str]:
    """Note on a task that asks in another chat template or system instruction, wherever its file was. Models that were tuned with
    different templates can only be compared like this, so that it is no error."""
    styles = [side.rows[key].get("style") or {} for side in (a, b)]
    same = [{name: value for name, value in style.items() if name != "chat_template"} for style in styles]
    if same[0] != same[1]:
        one, other = map(style_text, styles)
        yield f"The prompts differ, and so the models are compared together with their prompts: {one} in A, {other} in B"


def _differing_tasks(a: Side, b: Side, key: Key) -> Iterator[str]:
    """Notes on a task whose file was not the same, in what documents do not show: a preamble, a delimiter, a filter."""
    one, other = (side.rows[key].get("task_settings") or {} for side in (a, b))
    for name in sorted(one.keys() & other.keys()):  # an older llmtrain may have fewer, or none
        if one[name] != other[name]:
            values = [excerpt(json.dumps(some[name], ensure_ascii=False), 80) for some in (one, other)]
            yield f"The task itself differs: {name} is {values[0]} in A, {values[1]} in B"


def _differing_rows(a: Side, b: Side, key: Key) -> Iterator[str]:
    return _differing(a.rows[key], b.rows[key], _OF_ROWS)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any], besides: set[str]) -> Iterator[str]:
    for name in sorted((one.keys() | other.keys()) - besides):
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name)} in A, {other.get(name)} in B"


def _compare_task(a: Side, b: Side, key: Key, examples: int) -> TaskComparison:
    rows = a.rows[key], b.rows[key]
    if rows[0]["metric"] != rows[1]["metric"]:
        raise EvalError(
            f"{title_of(key)}: the headline is {rows[0]['metric']} in {a.folder}, {rows[1]['metric']} in {b.folder}; evaluate both "
            "with the same task file"
        )
    pairs = _pairs(a, b, key)
    macro = a.convention == "foundry"
    metrics: dict[str, Difference] = {}
    left_out: dict[str, str] = {}
    categories: dict[str, dict[str, Difference]] = {}
    names = list(dict.fromkeys((rows[0]["metric"], *rows[0]["metrics"], *rows[1]["metrics"])))
    for metric in names:
        if reason := _obstacle(metric, pairs, rows, (a, b)):
            left_out[metric] = reason
            continue
        parts = {name: _difference(metric, some) for name, some in _by_category(pairs).items()}
        whole = combined([(part, 1.0) for part in parts.values()]) if macro and parts else _difference(metric, pairs)
        if reason := _contradiction(metric, whole, rows, (a, b)):
            left_out[metric] = reason
            continue
        metrics[metric] = whole
        for name, part in parts.items():
            categories.setdefault(name, {})[metric] = part
    if not metrics:
        reasons = "; ".join(f"{metric}: {reason}" for metric, reason in left_out.items())
        raise EvalError(f"{title_of(key)}: no metric can be compared: {reasons}")
    shown = next(iter(metrics))
    gained, lost = _most_different(pairs, shown, examples)
    lower = frozenset(rows[0].get("lower_is_better", ()))
    a_better, b_better = (gained, lost) if shown in lower else (lost, gained)
    return TaskComparison(*key, shown, metrics, categories, left_out, a_better, b_better, lower)


def _pairs(a: Side, b: Side, key: Key) -> list[Pair]:
    """Lines of the same documents, by digest, in the order of a. Raises EvalError if the sets of documents differ."""
    lines = a.documents(key), b.documents(key)
    if any("digest" not in line for some in lines for line in some):
        raise EvalError(f"{title_of(key)}: its documents have no digests, by which both models' answers are matched")
    counts = [Counter(line["digest"] for line in some) for some in lines]
    if counts[0] != counts[1]:
        shared = (counts[0] & counts[1]).total()
        sizes = f"{len(lines[0]):,} in {a.folder}, {len(lines[1]):,} in {b.folder}, {shared:,} in both"
        remedy = "evaluate both with the same task file, data and limit"
        raise EvalError(f"{title_of(key)}: not the same documents: {sizes}; {remedy}")
    left: dict[str, list[Line]] = {}
    for line in reversed(lines[1]):
        left.setdefault(line["digest"], []).append(line)
    return [(line, left[line["digest"]].pop()) for line in lines[0]]


def _obstacle(metric: str, pairs: Sequence[Pair], rows: tuple[Any, Any], sides: tuple[Side, Side]) -> str | None:
    """Reason why a metric cannot be compared; None if it can be."""
    for row, side in zip(rows, sides, strict=True):
        if metric not in row["metrics"]:
            return f"{side.folder} does not have it"
    if any(metric not in line["values"] for pair in pairs for line in pair):
        return "it is no mean over documents"
    if any(contribution(one, metric)[1] != contribution(other, metric)[1] for one, other in pairs):
        return "it counts each model's own tokens, and their tokenizers differ"
    return None


def _contradiction(metric: str, whole: Difference, rows: tuple[Any, Any], sides: tuple[Side, Side]) -> str | None:
    """Reason not to compare a metric whose value in results.json is not that of the documents; None if it is."""
    for value, row, side in zip((whole.a, whole.b), rows, sides, strict=True):
        said = row["metrics"][metric]["value"]
        if not math.isclose(value, said, rel_tol=1e-6, abs_tol=1e-9):
            return f"{side.folder} says {said:.6g}, and its documents {value:.6g}, so that it is no mean over them"
    return None


def _difference(metric: str, pairs: Sequence[Pair]) -> Difference:
    a, b = ([contribution(pair[side], metric) for pair in pairs] for side in (0, 1))
    return paired_difference(metric, a, b)


def _by_category(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        if "category" in pair[0]:
            groups.setdefault(pair[0]["category"], []).append(pair)
    return {name: groups[name] for name in sorted(groups)}


def _most_different(pairs: Sequence[Pair], metric: str, examples: int) -> tuple[list[Answered], list[Answered]]:
    """Documents of which b has more, and less, of a metric than a, the largest change first; of hits, those of which the
    log-likelihoods moved most."""

    def change(pair: Pair) -> tuple[float, float]:
        before, after = (contribution(line, metric)[0] for line in pair)
        return after - before, _margin(pair[1]) - _margin(pair[0])

    changes = [(change(pair), pair) for pair in pairs]
    lost = sorted((one for one in changes if one[0][0] < 0), key=lambda one: one[0])
    won = sorted((one for one in changes if one[0][0] > 0), key=lambda one: (-one[0][0], -one[0][1]))
    gained, fallen = ([_answered(pair, metric) for _, pair in some[:examples]] for some in (won, lost))
    return gained, fallen


def _margin(line: Line) -> float:
    """Log-likelihood of the right choice above the best other one, in nats; 0 for documents without choices."""
    scores = _log_likelihoods(line)
    if "choices" not in line or "gold" not in line or len(scores) < 2:
        return 0.0
    return scores[line["gold"]] - max(score for number, score in enumerate(scores) if number != line["gold"])


def _log_likelihoods(line: Line) -> list[float]:
    """Log-likelihoods of the choices, without those after a PMI premise, or of a text."""
    return list(line.get("log_likelihoods", ()))[: len(line.get("choices", ())) or None]


def _answered(pair: Pair, metric: str) -> Answered:
    first, second = pair
    return Answered(
        str(first.get("where", "")),
        first.get("prompt", ""),
        first.get("right", ""),
        excerpt(given_answer(first, metric), 500),
        excerpt(given_answer(second, metric), 500),
        _log_likelihoods(first),
        _log_likelihoods(second),
    )
