"""Groups: their tasks with the settings that they change, and their aggregated metrics, against lm-evaluation-harness's own."""

import importlib.util
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.groups import Group, Leaf, by_file, by_name, leaves
from llmtrain.eval.lm_eval.index import TaskIndex, installed_folder
from llmtrain.eval.lm_eval.yaml_file import Function
from llmtrain.eval.report.metrics import Estimate, Metrics
from tests.support.task_files import write_files

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

FILES = {
    "a.yaml": "task: a\ndataset_path: d\ntag: [t, u]\nnum_fewshot: 1\nprocess_docs: !function utils.f\n",
    "b.yaml": "task: b\ndataset_path: d\ntag: t\n",
    "c.yaml": "task: c\ndataset_path: d\n",
    "inner.yaml": "group: inner\ngroup_alias: Inner\ntask: [a, b]\naggregate_metric_list: {metric: acc}\nnum_fewshot: 2\n",
    "outer.yaml": """
group: outer
task:
  - inner
  - c
  - {task: b, num_fewshot: 7, description: "for b"}
  - {task: in_place, dataset_path: e}
  - group: part
    group_alias: a part
    task: [t, {task: c, num_fewshot: 3}]
    aggregate_metric_list:
      - {metric: acc_norm, weight_by_size: false, filter_list: none}
aggregate_metric_list:
  - {metric: acc, aggregation: mean, weight_by_size: true}
  - {metric: exact_match, weight_by_size: false}
  - {metric: acc_norm, filter_list: [none, strict]}
target_delimiter: ""
metadata: {version: 1}
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path, FILES)


def measured(values: dict[str, Estimate], documents: int) -> Metrics:
    return Metrics(next(iter(values)), values, documents, documents, 0)


def one_group(folder: Path, name: str) -> Group:
    [found] = by_name(name, TaskIndex([folder]))
    assert isinstance(found, Group)
    return found


def changed(leaf: Leaf) -> dict[str, Any]:
    return {key: value for key, value in leaf.settings.items() if key not in ("task", "dataset_path", "process_docs")}


def test_settings_of_a_group_hold_for_its_tasks_and_those_of_an_entry_for_that_entry(folder):
    outer = one_group(folder, "outer")
    inner, part = outer.children["inner"], outer.children["outer::part"]
    assert isinstance(inner, Group) and isinstance(part, Group)
    assert {name: changed(one) for name, one in inner.children.items() if isinstance(one, Leaf)} == {
        "a": {"num_fewshot": 2, "target_delimiter": ""},
        "b": {"num_fewshot": 2, "target_delimiter": ""},
    }
    assert {name: changed(one) for name, one in outer.children.items() if isinstance(one, Leaf)} == {
        "c": {"target_delimiter": ""},
        "b": {"num_fewshot": 7, "description": "for b", "target_delimiter": ""},
        "outer::in_place": {"target_delimiter": ""},
    }
    assert {name: one.shots for name, one in part.children.items() if isinstance(one, Leaf)} == {"a": 1, "b": 0, "c": 3}
    assert (outer.alias, inner.alias, part.alias) == ("outer", "Inner", "a part")
    assert [one.name for one in outer.groups()] == ["outer", "inner", "outer::part"]
    assert [one.name for one in outer.leaves()] == ["a", "b", "c", "b", "outer::in_place", "a", "b", "c"]


def test_a_tag_stands_for_its_tasks(folder):
    assert [one.name for one in by_name("t", TaskIndex([folder]))] == ["a", "b"]


def test_settings_beside_a_groups_name_hold_for_its_tasks_which_keep_their_names(folder):
    (folder / "leaderboard.yaml").write_text(
        "group: board\ntask:\n  - {task: inner, num_fewshot: 5}\n  - {task: u, x: 1}\n"
    )
    board = one_group(folder, "board")
    assert [(one.name, changed(one)) for one in board.leaves()] == [
        ("a", {"num_fewshot": 5}),
        ("b", {"num_fewshot": 5}),
        ("a", {"num_fewshot": 1, "x": 1}),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("group: g\ntask: [a, nothing]\n", "group g: there is no task 'nothing'; none of the "),
        ("group: g\ntask: [a, innner]\n", "group g: there is no task 'innner'; did you mean inner?"),
        ("group: g\ntask: [{group: innner, x: 1}]\n", "group g: there is no group 'innner'; did you mean inner?"),
        (
            "group: g\ntask: a\n",
            "group g: task: expected a list of tasks, found a string ('a'); a task is marked by `tag`",
        ),
        ("group: g\n", "group g: task: expected a list of tasks, found nothing"),
        ("group: g\ntask: [{x: 1}]\n", "group g: expected a name, or a mapping with `task` or `group`, found {'x': 1}"),
        ("group: g\ntask: [a, {group: inner, task: [b]}]\n", "'inner' is written out here, and is also the name of"),
        ("group: g\ntask: [h]\n", "group g contains itself: g -> h -> g"),
        (
            "group: g\ntask: [a]\naggregate_metric_list: [acc]\n",
            "aggregate_metric_list: expected entries with `metric`",
        ),
        ("group: g\ntask: [a]\naggregate_metric_list: [{metric: acc, weigth: 1}]\n", "acc: unknown key weigth"),
        (
            "group: g\ntask: [a]\naggregate_metric_list: [{metric: acc, aggregation: !function u.f}]\n",
            "acc: aggregation: u.f of",
        ),
        ("task: g\nclass: !function task.G\n", "makes it a Python class (class: task.G of "),
    ],
)
def test_what_cannot_be_a_group_is_reported_with_its_file(folder, text, said):
    (folder / "g.yaml").write_text(text)
    (folder / "h.yaml").write_text("group: h\ntask: [g]\n")
    with pytest.raises(EvalError) as error:
        by_name("g", TaskIndex([folder]))
    assert said in str(error.value) and str(folder / "g.yaml") in str(error.value)


def test_a_file_by_its_path(folder):
    def index() -> TaskIndex:
        return TaskIndex([folder])

    assert by_file(folder / "a.yaml", index).name == "a"
    assert isinstance(by_file(folder / "inner.yaml", index), Group)
    (folder / "none.yaml").write_text("dataset_path: d\n")
    with pytest.raises(EvalError, match=r"none\.yaml: task: expected a name, found nothing"):
        by_file(folder / "none.yaml", index)


# --- against lm-evaluation-harness ---


def theirs(index: TaskIndex, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """What the harness makes of names: its own trees, of tasks that only hold their settings."""
    import lm_eval.tasks._factory as factory
    from lm_eval.api.task import Task
    from lm_eval.tasks._index import Entry, Kind
    from lm_eval.tasks._yaml_loader import load_yaml

    class Held(Task):
        def __init__(self, config: dict[str, Any]):
            self._config = config

        @property
        def task_name(self) -> str:
            return self._config["task"]

    Held.__abstractmethods__ = frozenset()
    monkeypatch.setattr(factory, "ConfigurableTask", Held)
    monkeypatch.setattr(factory, "load_yaml", lambda path, resolve_func: load_yaml(path, resolve_func=False))
    kinds = {"task": Kind.TASK, "class": Kind.PY_TASK, "group": Kind.GROUP, "tag": Kind.TAG}
    registry = {
        key: Entry(key, kinds[one.kind], one.file, tags=set(one.tasks) if one.kind == "tag" else set())
        for key, one in index.entries.items()
    }
    return lambda name: factory.TaskFactory().build(registry[name], registry=registry)


def plain(value: Any) -> Any:
    """A value with functions as the harness writes those that it does not import."""
    if isinstance(value, Function):
        return str(value.file.parents[value.reference.count(".") - 1] / value.reference)
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def our_tree(one: Leaf | Group) -> Any:
    if isinstance(one, Leaf):
        return {key: plain(value) for key, value in one.settings.items() if key != "metadata"}
    aggregates = [(item.metric, item.filters and list(item.filters), item.weight_by_size) for item in one.aggregates]
    return one.alias, aggregates, {name: our_tree(child) for name, child in one.children.items()}


def their_tree(one: Any) -> Any:
    from lm_eval.api.group import Group as TheirGroup

    if not isinstance(one, TheirGroup):
        return {key: value for key, value in one._config.items() if key != "metadata"}
    aggregates = [
        (item.metric, item.filter_list, bool(item.weight_by_size)) for item in one.aggregate_metric_list or ()
    ]
    return one.alias or one.name, aggregates, {name: their_tree(child) for name, child in one._children.items()}


@needs_harness
def test_a_groups_tree_is_the_harnesss(folder, monkeypatch):
    index = TaskIndex([folder])
    assert our_tree(one_group(folder, "outer")) == their_tree(theirs(index, monkeypatch)("outer"))


ONE_NAME_FOR_ALL = {"openllm"}
"""Groups that set something for a group or tag by `task: NAME`; 0.4.13 then calls all of its tasks NAME, so one remains."""


@needs_harness
@pytest.mark.slow
def test_every_shipped_groups_tree_is_the_harnesss(monkeypatch):
    installed = installed_folder()
    assert installed is not None
    index = TaskIndex([installed])
    of_harness = theirs(index, monkeypatch)
    compared, refused = 0, []
    for name, entry in index.entries.items():
        if entry.kind != "group" or name in ONE_NAME_FOR_ALL:
            continue
        try:
            [ours] = by_name(name, index)
        except EvalError as error:
            refused.append(str(error))
            continue
        assert our_tree(ours) == their_tree(of_harness(name)), name
        compared += 1
    assert compared > 800 and len(refused) < 30, refused


@needs_harness
@pytest.mark.parametrize("seed", range(5))
def test_aggregated_metrics_are_the_harnesss(folder, monkeypatch, seed):
    from lm_eval.evaluator_utils import EvalAcc, aggregate_groups

    from llmtrain.eval.lm_eval.scores import aggregate_group

    index, rng = TaskIndex([folder]), random.Random(seed)
    ours, root = one_group(folder, "outer"), theirs(index, monkeypatch)("outer")
    metrics = ["acc", "acc_norm", "acc_norm,strict", "exact_match,strict", "exact_match,flexible", "f1"]
    tasks: dict[str, Metrics] = {}
    for leaf in ours.leaves():
        size = rng.randint(2, 500)
        kept = metrics if leaf.name == "c" else rng.sample(metrics, rng.randint(2, 6))
        tasks[leaf.name] = measured(
            {name: Estimate(rng.random(), None if rng.random() < 0.1 else 0.1 * rng.random()) for name in kept}, size
        )
    results: Any = EvalAcc()
    results.groups = {one.name: one for one in (root, *root.get_all_groups())}
    for name, one in tasks.items():
        row: dict[str, Any] = {"name": name, "alias": name, "sample_len": one.documents}
        for key, value in one.values.items():
            metric, _, chain = key.partition(",")
            row[f"{metric},{chain or 'none'}"] = value.value
            row[f"{metric}_stderr,{chain or 'none'}"] = "N/A" if value.stderr is None else value.stderr
        results.metrics[name] = row
    aggregate_groups(results)
    for group in ours.groups():
        found: dict[str, Any] = {}
        for name, one in aggregate_group(group, tasks).items():
            metric, _, kept = name.partition(",")
            key = f"{metric},{kept or 'none'}"
            error = f"{metric}_stderr,{kept or 'none'}"
            found |= {key: one.estimate.value, error: -1.0 if one.estimate.stderr is None else one.estimate.stderr}
            assert results.metrics[group.name]["sample_count"][key] == one.documents
        row = {key: value for key, value in results.metrics[group.name].items() if "," in key}
        expected = {key: -1.0 if value == "N/A" else value for key, value in row.items()}
        assert found == pytest.approx(expected, rel=1e-12)


@needs_harness
def test_a_metric_that_some_task_lacks_names_it(folder):
    from llmtrain.eval.lm_eval.scores import aggregate_group

    inner = one_group(folder, "inner")
    found = aggregate_group(inner, {"a": measured({"acc": Estimate(0.5, 0.1)}, 10)})
    assert found["acc"].missing == ["b"] and found["acc"].estimate == Estimate(0.5, pytest.approx(0.1))  # type: ignore[arg-type]
    assert aggregate_group(inner, {"a": measured({"f1": Estimate(0.5, 0.1)}, 10)}) == {}
    assert [one.name for one in leaves(inner)] == ["a", "b"]
