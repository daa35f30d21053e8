"""Differences of averages over tasks: of a gauntlet's categories, and of lm-evaluation-harness's groups. Imports no torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmtrain.eval.compare.read import Key, Side
from llmtrain.eval.compare.statistics import Difference, combined

Metrics = Mapping[str, Difference]
Part = tuple[Difference, float]
"""A difference and its weight."""


def gauntlet_differences(
    a: Side, b: Side, tasks: Mapping[Key, Metrics]
) -> tuple[str | None, dict[str, Difference], str | None]:
    """(name, differences of averages and categories, a note where both have one that cannot be compared)."""
    ours, theirs = a.gauntlet, b.gauntlet
    if ours is None or theirs is None:
        return None, {}, None
    name = ours["name"]
    compared = ("category", "task", "shots", "metric", "baseline", "scale", "weight")
    benchmarks, others = (
        [{key: one[key] for key in compared} for one in side.get("benchmarks", ())] for side in (ours, theirs)
    )
    if name != theirs["name"] or benchmarks != others or ours["averages_of"] != theirs["averages_of"]:
        return None, {}, "The gauntlets are not the same, and are not compared."
    parts: dict[str, list[tuple[Difference, float]]] = {}
    for one in benchmarks:
        found = tasks.get((one["task"], one["shots"]))
        if found is None or one["metric"] not in found:
            return None, {}, f"Gauntlet {name} is not compared, because {one['task']} is not."
        difference = found[one["metric"]].rescaled(one["baseline"], one["scale"])
        parts.setdefault(one["category"], []).append((difference, one["weight"]))
    categories = {category: combined(some) for category, some in parts.items()}
    averages = {
        average: combined([(categories[member], 1.0) for member in members])
        for average, members in ours["averages_of"].items()
    }
    return name, averages | categories, None


def group_differences(
    a: Side, b: Side, tasks: Mapping[Key, Metrics]
) -> tuple[dict[str, dict[str, Difference]], dict[str, frozenset[str]], list[str]]:
    """(group -> metric -> difference, group -> metrics of which lower values are better, notes on what is not compared), for
    groups of both."""
    found: dict[str, dict[str, Difference]] = {}
    falling: dict[str, frozenset[str]] = {}
    notes: list[str] = []
    theirs = {_identity(one): one for one in b.groups}
    for group in a.groups:
        other = theirs.get(_identity(group))
        if other is None:
            continue
        failed = [*group.get("failed", ()), *other.get("failed", ())]
        title = group["group"] if group["shots"] is None else f"{group['group']} ({group['shots']}-shot)"
        if failed:
            notes.append(f"Group {title} is not compared, because {failed[0]} failed.")
        keys = [list(_leaves(side, one)) for side, one in ((a, group), (b, other))]
        for metric in [name for name in group["metrics"] if name in other["metrics"]]:
            said = [one["metrics"][metric]["value"] for one in (group, other)]
            difference = _weighted_as(said, metric, keys[0], a, tasks) if keys[0] == keys[1] else None
            if difference is None:
                notes.append(f"Group {title}: {metric} is not compared, because not all of its tasks are.")
            else:
                found.setdefault(title, {})[metric] = difference
        rows = [a.rows[key] for key in keys[0]]
        falling[title] = frozenset(
            metric
            for metric in found.get(title, ())
            if all(metric in row.get("lower_is_better", ()) for row in rows if metric in row["metrics"])
        )
    return found, falling, notes


def _identity(group: Mapping[str, Any]) -> tuple[str, tuple[str, ...], int | None]:
    return group["group"], tuple(group["parents"]), group["shots"]


def _leaves(side: Side, group: Mapping[str, Any]) -> Iterator[Key]:
    """Tasks below a group, in order; one that is in two of its groups twice."""
    titles = {f"{task} ({shots}-shot)": (task, shots) for task, shots in side.rows}
    below = {one["group"]: one for one in side.groups if one["parents"] == [*group["parents"], group["group"]]}
    for child in group["children"]:
        if child in titles:
            yield titles[child]
        elif child in below:
            yield from _leaves(side, below[child])


def _weighted_as(
    said: Sequence[float], metric: str, keys: Sequence[Key], side: Side, tasks: Mapping[Key, Metrics]
) -> Difference | None:
    """Difference of the mean over documents, or else over tasks, whichever gives the values of both results; None: neither."""
    having = [key for key in keys if metric in side.rows[key]["metrics"]]
    if not having or any(metric not in tasks.get(key, ()) for key in having):
        return None
    for by_size in (True, False):
        parts = [(tasks[key][metric], float(side.rows[key]["documents"]) if by_size else 1.0) for key in having]
        made = combined(parts)
        if all(math.isclose(one, other, rel_tol=1e-6) for one, other in zip(said, (made.a, made.b), strict=True)):
            return made
    return None
