"""Groups of lm-evaluation-harness: their tasks, the settings that they change, and the metrics that they aggregate.

A group's file lists tasks, groups and tags, or writes them out in place. Whatever else it says (num_fewshot, say) holds for
all tasks below it, an entry's settings for that entry. Tasks keep their names; those written in place are called GROUP::NAME.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.config.report import type_name
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.index import Entry, TaskIndex
from llmtrain.eval.lm_eval.yaml_file import read_task_file
from llmtrain.eval.report.metrics import Estimate

_OF_GROUPS = ("group", "group_alias", "task", "aggregate_metric_list", "metadata")
"""Keys that describe a group itself; all others are settings of its tasks."""


@dataclass(frozen=True)
class Leaf:
    """A task, with its settings as its groups have changed them. file: the YAML that names it."""

    name: str
    settings: Mapping[str, Any]
    file: Path

    @property
    def shots(self) -> int:
        """Number of few-shot examples with which it is to run; the perplexity of a text has none."""
        return (
            0 if self.settings.get("output_type") == "loglikelihood_rolling" else self.settings.get("num_fewshot") or 0
        )


@dataclass(frozen=True)
class Aggregate:
    """Metric that a group aggregates. filters: names of filters of answers; None: all that its tasks have."""

    metric: str
    filters: tuple[str, ...] | None
    weight_by_size: bool


@dataclass
class Group:
    """Tasks and groups by name, in order."""

    name: str
    alias: str
    aggregates: list[Aggregate]
    file: Path
    children: dict[str, Leaf | Group] = field(default_factory=dict)

    def leaves(self) -> list[Leaf]:
        """All tasks below; one that is in two of its groups twice, as it counts."""
        return [leaf for child in self.children.values() for leaf in leaves(child)]

    def groups(self) -> Iterator[Group]:
        """This group, and all below."""
        yield self
        for child in self.children.values():
            if isinstance(child, Group):
                yield from child.groups()


@dataclass(frozen=True)
class GroupRun:
    """A group that is to be reported. shots: those of all its tasks; None: each task's own."""

    group: Group
    shots: int | None

    def tasks(self, group: Group) -> dict[str, int]:
        """Numbers of few-shot examples of a group's tasks, by name."""
        return {leaf.name: leaf.shots if self.shots is None else self.shots for leaf in group.leaves()}


def leaves(one: Leaf | Group) -> list[Leaf]:
    return [one] if isinstance(one, Leaf) else one.leaves()


def by_name(name: str, index: TaskIndex) -> list[Leaf | Group]:
    """The task or group of a name, or the tasks of a tag. Raises EvalError."""
    return _Builder(index).entry(index[name], {}, ())


def by_file(file: Path, index: Callable[[], TaskIndex]) -> Leaf | Group:
    """The task or group of a file. index: gives where a group's tasks are found. Raises EvalError."""
    settings = read_task_file(file)
    if "class" not in settings and "group" in settings:
        return _Builder(index()).group(_name(settings, "group", file), settings, file, {}, ())
    return _leaf(_name(settings, "task", file), settings, file)


class _Builder:
    """Builds the tree below a name. outer: the groups around it; overrides: what they change in their tasks."""

    def __init__(self, index: TaskIndex):
        self._index = index

    def entry(self, entry: Entry, overrides: Mapping[str, Any], outer: tuple[str, ...]) -> list[Leaf | Group]:
        if entry.kind == "tag":
            marked = [self._index[name] for name in sorted(entry.tasks)]
            return [one for task in marked if task.kind != "tag" for one in self.entry(task, overrides, outer)]
        assert entry.file is not None
        settings = self._index.settings(entry.file)
        if entry.kind == "group":
            return [self.group(entry.name, settings, entry.file, overrides, outer)]
        return [_leaf(entry.name, {**settings, **overrides}, entry.file)]

    def group(
        self, name: str, settings: Mapping[str, Any], file: Path, overrides: Mapping[str, Any], outer: tuple[str, ...]
    ) -> Group:
        if name in outer:
            raise EvalError(f"{file}: group {name} contains itself: {' -> '.join((*outer, name))}")
        listed = settings.get("task")
        if not isinstance(listed, list) or not listed:
            found = "nothing" if not listed else f"{type_name(listed)} ({listed!r})"
            raise EvalError(
                f"{file}: group {name}: task: expected a list of tasks, found {found}; a task is marked by `tag`"
            )
        alias = settings.get("group_alias") or name
        made = Group(name, str(alias), list(_aggregates(settings.get("aggregate_metric_list"), name, file)), file)
        inherited = {key: value for key, value in settings.items() if key not in _OF_GROUPS} | dict(overrides)
        for item in listed:
            for child in self._members(item, made, inherited, (*outer, name)):
                made.children[child.name] = child
        return made

    def _members(
        self, item: Any, group: Group, inherited: dict[str, Any], outer: tuple[str, ...]
    ) -> list[Leaf | Group]:
        where = f"{group.file}: group {group.name}"
        if isinstance(item, str):
            item = {"task": item}
        name = item.get("group", item.get("task")) if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise EvalError(f"{where}: expected a name, or a mapping with `task` or `group`, found {item!r}")
        if "group" in item and isinstance(item.get("task"), list):
            if name in self._index:
                other = self._index[name].file or "a tag"
                raise EvalError(
                    f"{where}: '{name}' is written out here, and is also the name of {other}; rename this one"
                )
            return [self.group(f"{group.name}::{name}", item, group.file, inherited, outer)]
        settings = inherited | {key: value for key, value in item.items() if key not in ("task", "group")}
        if name in self._index:
            return self.entry(self._index[name], settings, outer)
        if "group" in item or not settings.keys() & {"dataset_path", "custom_dataset"}:
            kind = "group" if "group" in item else "task"
            raise EvalError(f"{where}: there is no {kind} '{name}'; {self._index.hint(name)}")
        return [_leaf(f"{group.name}::{name}", settings, group.file)]


def _name(settings: Mapping[str, Any], key: str, file: Path) -> str:
    name = settings.get(key)
    if not isinstance(name, str) or not name:
        raise EvalError(f"{file}: {key}: expected a name, found {'nothing' if name is None else type_name(name)}")
    return name


def _leaf(name: str, settings: Mapping[str, Any], file: Path) -> Leaf:
    if "class" in settings:
        raise EvalError(
            f"task {name}: {file} makes it a Python class (class: {settings['class']}), which llmtrain cannot run"
        )
    kept = {key: value for key, value in settings.items() if key not in ("tag", "group", "task_list")}
    return Leaf(name, kept | {"task": name}, file)


def _aggregates(value: Any, group: str, file: Path) -> Iterator[Aggregate]:
    where = f"{file}: group {group}: aggregate_metric_list"
    for item in [value] if isinstance(value, dict) else value or ():
        if not isinstance(item, dict) or not isinstance(item.get("metric"), str):
            raise EvalError(f"{where}: expected entries with `metric`, found {item!r}")
        if unknown := item.keys() - {"metric", "filter_list", "aggregation", "weight_by_size"}:
            known = "metric, filter_list, aggregation, weight_by_size"
            raise EvalError(f"{where}: {item['metric']}: unknown key {min(unknown)}; there are {known}")
        if item.get("aggregation", "mean") != "mean":
            raise EvalError(f"{where}: {item['metric']}: aggregation: {item['aggregation']}; a group has only mean")
        filters = item.get("filter_list")
        if isinstance(filters, str):
            filters = [filters]
        yield Aggregate(
            item["metric"], None if filters is None else tuple(filters), bool(item.get("weight_by_size", True))
        )


@dataclass(frozen=True)
class GroupMetric:
    """Aggregated metric of a group. documents: of the tasks that have it; missing: tasks that have not."""

    estimate: Estimate
    documents: int
    missing: list[str]
