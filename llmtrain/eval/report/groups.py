"""Groups of lm-evaluation-harness in results: their aggregated metrics above those of their tasks. Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llmtrain.errors import first_few
from llmtrain.eval.lm_eval.groups import Group, GroupMetric, GroupRun, Leaf
from llmtrain.eval.report.metrics import Estimate, Result


@dataclass(frozen=True)
class GroupResult:
    """One group's aggregated metrics of one model.

    parents: names of the groups around it, the outermost first. shots: few-shot examples of all its tasks; None where tasks
    differ. children: titles of its tasks, names of its groups. failed: titles of tasks, also of those in its groups, without a
    result; the group then has no metrics, because an average of the others would be another number.
    """

    model: str
    group: str
    alias: str
    parents: tuple[str, ...]
    shots: int | None
    children: tuple[str, ...]
    metrics: dict[str, GroupMetric]
    failed: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return self.group if self.shots is None else f"{self.group} ({self.shots}-shot)"


def group_results(groups: Sequence[GroupRun], model: str, results: Sequence[Result]) -> list[GroupResult]:
    """Results of one model's groups, each followed by the groups within it; without metrics where a task has no result."""
    found = {(one.task, one.shots): one for one in results if one.model == model}
    return [one for run in groups for one in _below(run.group, run, (), model, found)]


def _below(
    group: Group, run: GroupRun, parents: tuple[str, ...], model: str, found: dict[tuple[str, int], Result]
) -> Iterator[GroupResult]:
    shots = run.tasks(group)
    results = {name: found[name, count] for name, count in shots.items() if (name, count) in found}
    metrics: dict[str, GroupMetric] = {}
    counts = set(shots.values())
    children = tuple(
        f"{child.name} ({shots[child.name]}-shot)" if isinstance(child, Leaf) else child.name
        for child in group.children.values()
    )
    common = counts.pop() if len(counts) == 1 else None
    failed = tuple(f"{name} ({count}-shot)" for name, count in shots.items() if name not in results)
    if not failed:
        from llmtrain.eval.lm_eval.scores import aggregate_group

        metrics = aggregate_group(group, {name: one.metrics for name, one in results.items()})
    yield GroupResult(model, group.name, group.alias, parents, common, children, metrics, failed)
    for child in group.children.values():
        if isinstance(child, Group):
            yield from _below(child, run, (*parents, group.name), model, found)


def group_json(one: GroupResult) -> dict[str, Any]:
    """Entry of results.json."""
    return {
        **{key: getattr(one, key) for key in ("model", "group", "alias", "shots")},
        "parents": list(one.parents),
        "children": list(one.children),
        "failed": list(one.failed),
        "metrics": {
            name: {**asdict(metric.estimate), "documents": metric.documents, "missing": metric.missing}
            for name, metric in one.metrics.items()
        },
    }


@dataclass(frozen=True)
class GroupRow:
    """A row of the table of groups. values: by model. failed: models without a value because a task failed."""

    title: str
    metric: str
    documents: int
    values: dict[str, Estimate]
    failed: frozenset[str] = frozenset()


def group_rows(groups: Sequence[GroupResult], results: Sequence[Result]) -> list[GroupRow]:
    """Rows of groups, each with its groups and tasks indented below it; of a task, the metrics that its group aggregates."""
    by_title = {(one.model, one.title): one.metrics for one in results}
    alike: dict[tuple[str, tuple[str, ...], int | None], list[GroupResult]] = {}
    for one in groups:
        alike.setdefault((one.group, one.parents, one.shots), []).append(one)
    rows: list[GroupRow] = []
    for same in alike.values():
        first, depth = same[0], len(same[0].parents)
        label = f"{_indent(depth)}**{first.alias}**" + ("" if first.shots is None else f" ({first.shots}-shot)")
        metrics = list(dict.fromkeys(metric for one in same for metric in one.metrics))
        failed = frozenset(one.model for one in same if one.failed)
        for metric in metrics:
            found = {one.model: one.metrics[metric] for one in same if metric in one.metrics}
            values = {model: one.estimate for model, one in found.items()}
            rows.append(GroupRow(label, metric, next(iter(found.values())).documents, values, failed))
        if not metrics:
            rows.append(GroupRow(label, "", 0, {}, failed))
        for child in first.children:
            failed = frozenset(one.model for one in same if child in one.failed)
            tasks = {one.model: by_title[one.model, child] for one in same if (one.model, child) in by_title}
            title = _indent(depth + 1) + child
            if not tasks:
                rows += [GroupRow(title, "", 0, {}, failed)] if failed else []
                continue
            shown = next(iter(tasks.values()))
            for metric in [name for name in metrics if name in shown.values] or [shown.headline]:
                values = {model: one.values[metric] for model, one in tasks.items() if metric in one.values}
                rows.append(GroupRow(title, metric, shown.documents, values, failed))
    return rows


def _indent(depth: int) -> str:
    return "&nbsp;&nbsp;" * depth


def group_notes(groups: Sequence[GroupResult]) -> Iterator[str]:
    """Sentences on groups without metrics, because tasks failed, and on metrics that not all of a group's tasks have."""
    for one in groups:
        if one.failed:
            yield f"{one.model}, {one.title}: no average, because {_failed(one)}."
        for name, metric in one.metrics.items():
            if metric.missing:
                yield f"{one.model}, {one.title}: {len(metric.missing)} of its tasks have no {name} ({first_few(metric.missing)})."


def _failed(one: GroupResult) -> str:
    return f"{len(one.failed)} of its tasks failed ({first_few(one.failed)})"


def group_lines(groups: Sequence[GroupResult]) -> list[str]:
    """A line for each aggregated metric, or one that says why there is none, for the terminal."""
    lines = []
    for one in groups:
        lines += [f"{one.model}  {one.title}  no average: {_failed(one)}"] if one.failed else []
        for name, metric in one.metrics.items():
            error = "" if metric.estimate.stderr is None else f" ± {metric.estimate.stderr:.4f}"
            lines.append(
                f"{one.model}  {one.title}  {name} {metric.estimate.value:.4f}{error}  {metric.documents} documents"
            )
    return lines
