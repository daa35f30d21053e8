"""Files of lm-evaluation-harness: includes, functions, and what is said of files that cannot be read."""

from pathlib import Path

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.yaml_file import Function, read_task_file


def write(folder: Path, **files: str) -> Path:
    """Files by name, `_` for the dot before yaml. Returns the first."""
    paths = []
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths[0]


def error(path: Path) -> str:
    with pytest.raises(EvalError) as caught:
        read_task_file(path)
    return str(caught.value)


def test_settings_of_a_file_replace_those_of_its_includes(tmp_path):
    file = write(
        tmp_path,
        task="include: base.yaml\ntask: mine\nmetric_list:\n  - metric: acc\n",
        base="include: root.yaml\ntask: base\ntest_split: test\ntask_list: [a]\n",
        root="task: root\ntest_split: other\nmetric_list: [{metric: f1}, {metric: acc}]\nnum_fewshot: 3\n",
    )
    assert read_task_file(file) == {
        "task": "mine",
        "test_split": "test",
        "metric_list": [{"metric": "acc"}],
        "num_fewshot": 3,
    }


def test_of_several_includes_a_later_one_replaces_an_earlier(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    other = write(tmp_path / "elsewhere", other="a: other\nb: other\n")
    file = write(tmp_path, task=f"include: [one.yaml, {other}]\nb: own\n", one="a: one\nc: one\n")
    assert read_task_file(file) == {"a": "other", "b": "own", "c": "one"}


def test_a_file_may_be_included_on_two_ways(tmp_path):
    file = write(tmp_path, task="include: [a.yaml, b.yaml]\n", a="include: c.yaml\n", b="include: c.yaml\n", c="x: 1\n")
    assert read_task_file(file) == {"x": 1}


def test_a_function_belongs_to_the_folder_of_the_yaml_that_writes_it(tmp_path):
    write(tmp_path / "below", base="process_docs: !function utils.docs\n")
    file = write(tmp_path, task="include: below/base.yaml\ndoc_to_text: !function sub.prompts.text\n")
    assert read_task_file(file) == {
        "process_docs": Function("utils.docs", tmp_path / "below/utils.py"),
        "doc_to_text": Function("sub.prompts.text", tmp_path / "sub/prompts.py"),
    }


def test_values_are_those_of_yaml_1_1_as_the_harness_reads_them(tmp_path):
    file = write(tmp_path, task="a: no\nb: 1e-4\nc: 010\nd: 'no'\n")
    assert read_task_file(file) == {"a": False, "b": "1e-4", "c": 8, "d": "no"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task: [a\nb: c", "task.yaml: line 2, column 2:"),
        ("task: a\nx: !!python/object:os.system {}", "task.yaml: line 2, column 4: could not determine a constructor"),
        ("- a\n", "task.yaml: is not a mapping of settings; it needs task, or group"),
        ("", "task.yaml: is empty; it needs task, or group"),
        ("a: &a [*a]", "task.yaml: line 1, column 8: an alias (*) to a value that contains it"),
        ("a: " + "[" * 40 + "]" * 40, "task.yaml: line 1, column 35: more than 32 mappings and lists"),
        ("x: " + "[" * 100_000, "task.yaml: "),
        ("x: \x01", "task.yaml: is no text that YAML allows"),
        ("f: !function docs", "task.yaml: line 1, column 4: !function needs module.name, found 'docs'"),
        ("d: 2024-02-31", "task.yaml: has a value that YAML cannot read: day is out of range"),
        ("1: a", "task.yaml: a key must be a name, found 1; put it in quotes"),
        ("include: {a: b}", "task.yaml: include: expected a path or a list of paths, found a mapping"),
        ("include:", "task.yaml: include: expected a path or a list of paths, found empty"),
        ("include: none.yaml", "task.yaml: include: "),
    ],
)
def test_what_cannot_be_read_is_reported_with_file_and_line(tmp_path, text, said):
    assert said in error(write(tmp_path, task=text))


def test_aliases_cannot_exhaust_memory(tmp_path):
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "more than 10,000 values" in error(write(tmp_path, task="\n".join(lines)))


def test_includes_in_a_circle_are_named(tmp_path):
    file = write(tmp_path, a="include: b.yaml\n", b="include: c.yaml\n", c="include: b.yaml\n")
    b, c = tmp_path / "b.yaml", tmp_path / "c.yaml"
    assert error(file) == f"{c}: include: goes round in a circle: {b} -> {c} -> {b}"
