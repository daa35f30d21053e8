"""Files of a comparison: compare.json, .md, .csv and .png. Imports no torch."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmtrain.eval.compare.compare import Answered, Comparison, TaskComparison
from llmtrain.eval.compare.statistics import Difference
from llmtrain.eval.report.files import write_text
from llmtrain.eval.report.metrics import is_perplexity, is_share
from llmtrain.pictures import new_figure, save_figure
from llmtrain.tables import csv_text, markdown_table

CSV_COLUMNS = ("task", "shots", "category", "metric", "a", "b", "difference", "stderr", "low", "high", "p", "n")


def write_comparison(found: Comparison, folder: Path) -> list[Path]:
    """Write all files, each atomically, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(as_json(found), indent=1, ensure_ascii=False)
    return [
        write_text(folder / "compare.json", content + "\n"),
        write_text(folder / "compare.md", as_markdown(found)),
        write_text(folder / "compare.csv", as_csv(found)),
        draw(found, folder / "compare.png"),
    ]


def as_json(found: Comparison) -> dict[str, Any]:
    def numbers(differences: dict[str, Difference]) -> dict[str, Any]:
        return {name: _fields(one) for name, one in differences.items()}

    tasks = [
        {
            **{key: getattr(one, key) for key in ("task", "shots", "metric", "left_out")},
            "lower_is_better": sorted(one.lower_is_better),
            "metrics": numbers(one.metrics),
            "categories": {name: numbers(differences) for name, differences in one.categories.items()},
            "a_better": [asdict(document) for document in one.a_better],
            "b_better": [asdict(document) for document in one.b_better],
        }
        for one in found.tasks
    ]
    gauntlet = {"name": found.gauntlet_name, "scores": numbers(found.gauntlet)} if found.gauntlet_name else None
    groups = {name: numbers(differences) for name, differences in found.groups.items()}
    about: dict[str, Any] = {"a": found.a, "b": found.b, "convention": found.convention}
    return {**about, "tasks": tasks, "groups": groups, "gauntlet": gauntlet, "notes": found.notes}


def _fields(one: Difference) -> dict[str, Any]:
    numbers = {key: getattr(one, key) for key in ("a", "b", "stderr", "low", "high", "p", "n", "test")}
    return {"difference": one.value, **numbers}


def as_csv(found: Comparison) -> str:
    """Table with one row per task, category and metric, unrounded, then the gauntlet's."""
    rows = ((place, _fields(one)) for place, one in _all_differences(found))
    return csv_text([CSV_COLUMNS, *([*place, *map(fields.get, CSV_COLUMNS[len(place) :])] for place, fields in rows)])


def _all_differences(found: Comparison) -> Iterator[tuple[tuple[Any, ...], Difference]]:
    for task in found.tasks:
        for category, differences in (("", task.metrics), *task.categories.items()):
            for metric, one in differences.items():
                yield (task.task, task.shots, category, metric), one
    for group, metric, one in _of_groups(found):
        yield (group, None, "", metric), one
    for name, one in found.gauntlet.items():
        yield (f"gauntlet {found.gauntlet_name}", None, name, "score"), one


def _of_groups(found: Comparison) -> Iterator[tuple[str, str, Difference]]:
    for group, differences in found.groups.items():
        for metric, one in differences.items():
            yield group, metric, one


def as_markdown(found: Comparison) -> str:
    """Tables of tasks, the gauntlet and categories, the documents on which the models differ most, and notes."""
    lines = [f"# {found.b}, compared with {found.a}", ""]
    lines += [
        f"A is {found.a}, B is {found.b}, both in `{found.convention}` convention. Differences are B − A over the same documents, "
        "± one standard error; accuracies in percent. p: of a difference this large between equal models. Of twenty intervals "
        "of equal models, one excludes 0 by chance.",
        "",
    ]
    lines += _table("task", ((one.title, one.metric, one.headline) for one in found.tasks))
    if found.groups:
        lines += ["", "## Groups", ""]
        lines += _table("group", _of_groups(found))
    if found.gauntlet_name:
        lines += ["", f"## Gauntlet {found.gauntlet_name}", ""]
        lines += _table("average", ((name, "score", one) for name, one in found.gauntlet.items()))
    for task in found.tasks:
        if task.categories:
            lines += ["", f"## Categories of {task.title}", ""]
            lines += _table(
                "category",
                ((name, task.metric, differences[task.metric]) for name, differences in task.categories.items()),
            )
    if shown := [line for task in found.tasks for line in _documents(task)]:
        lines += ["", "## Documents on which they differ most", *shown]
    if found.notes:
        lines += ["", "## Notes", "", *(f"- {note}" for note in found.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _table(head: str, rows: Iterable[tuple[str, str, Difference]]) -> list[str]:
    heads = [head, "metric", "documents", "A", "B", "B − A", "95 % interval", "p"]
    return markdown_table(heads, [[name, metric, f"{one.n:,}", *_shown(metric, one)] for name, metric, one in rows])


def _shown(metric: str, one: Difference) -> list[str]:
    """Cells of A, B, the difference, its interval and p."""
    if not is_share(metric, one.a, one.b):
        scale, value, difference = 1.0, ".4g", ".3g"
    else:
        scale, value, difference = 100.0, ".1f", ".2f"

    def signed(number: float) -> str:
        return f"{scale * number:+{difference}}".replace("-", "−", 1)

    error = "" if one.stderr is None else f" ± {scale * one.stderr:{difference}}"
    interval = "" if one.low is None or one.high is None else f"{signed(one.low)} to {signed(one.high)}"
    p = "" if one.p is None else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
    return [f"{scale * one.a:{value}}", f"{scale * one.b:{value}}", f"{signed(one.value)}{error}", interval, p]


def _documents(task: TaskComparison) -> Iterator[str]:
    for name, some in (("A", task.a_better), ("B", task.b_better)):
        if some:
            yield from ("", f"{task.title}, better by {name}:", "")
            yield from markdown_table(
                ["document", "prompt", "right", "A", "B"],
                [[one.where, *(" ".join(cell.split()).replace("<", "&lt;") for cell in _cells(one))] for one in some],
                numbers=False,
            )


def _cells(one: Answered) -> list[str]:
    def with_scores(answer: str, scores: Sequence[float]) -> str:
        return f"{answer} ({', '.join(f'{score:.2f}' for score in scores)})" if len(scores) > 1 else answer

    return [one.prompt, one.right, with_scores(one.a, one.log_likelihoods_a), with_scores(one.b, one.log_likelihoods_b)]


def draw(found: Comparison, path: Path) -> Path:
    """Draw the differences with their intervals and a line at zero: accuracies in percentage points, and perplexities and what
    else falls as a model improves, on a panel of their own, in percent of A's."""
    rows = [(f"{one.title}\n{one.metric}", one.metric, one.headline, one.lower_is_better) for one in found.tasks]
    rows += [(f"{group}\n{metric}", metric, one, found.falling[group]) for group, metric, one in _of_groups(found)]

    def falls(metric: str, lower: frozenset[str]) -> bool:
        return is_perplexity(metric) or metric in lower

    accuracies = [
        (name, one, 100.0 if is_share(metric, one.a, one.b) else 1.0)
        for name, metric, one, lower in rows
        if not falls(metric, lower)
    ]
    accuracies += [(f"{found.gauntlet_name}\n{name}", one, 100.0) for name, one in found.gauntlet.items()]
    others = [(name, one, 100.0 / (abs(one.a) or 1.0)) for name, metric, one, lower in rows if falls(metric, lower)]
    panels = [
        (label, some)
        for label, some in (
            ("B − A, percentage points (right: B is better)", accuracies),
            ("B − A, percent of A's (left: B is better)", others),
        )
        if some
    ]
    heights = [len(some) + 1.5 for _, some in panels]
    figure = new_figure(8.0, 0.42 * sum(heights) + 1.0)
    grid = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for axes, (label, some) in zip(grid[:, 0], panels, strict=True):
        for place, (_, one, scale) in enumerate(some):
            if one.low is not None and one.high is not None:
                clear = one.low > 0 or one.high < 0
                axes.plot(
                    [scale * one.low, scale * one.high], [place, place], color="C0" if clear else "C7", linewidth=2
                )
            axes.plot(scale * one.value, place, "o", color="black", markersize=4)
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(some)), [name for name, _, _ in some], fontsize=8)
        axes.set(xlabel=label, ylim=(len(some) - 0.5, -0.5))
        axes.grid(axis="x", alpha=0.3)
    figure.suptitle(f"B: {found.b}\nA: {found.a}\n95 % intervals", fontsize=9)
    return save_figure(figure, path)
