"""Names of tasks, groups and tags below folders, against lm-evaluation-harness's own index."""

import importlib.util
import time
from pathlib import Path

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.index import TaskIndex, index_of, installed_folder
from tests.support.task_files import write_files

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

FILES = {
    "a.yaml": "task: one\ntag: easy\n",
    "b.yaml": "task: two\ntag:\n  - easy\n  - hard\n",
    "c.yaml": "include: _base\ntask: three\n",
    "_base": "tag: [hard]\ndoc_to_text: |\n  task: none\n",
    "d.yaml": '"task": "four"  # a comment\n"tag": "easy"\n',
    "e.yaml": "task: one\ntag: second\n",
    "f.yaml": "group: all\ntask:\n  - one\n  - two\ntag: not_of_groups\n",
    "g.yaml": "task: five\nclass: !function task.Five\n",
    "h.yaml": "description: 'text\n\ntask: not_this\n\n  more'\ntask: six\n",
    "i.yaml": "{task: seven, tag: easy}\n",
    "j.yaml": "task: easy\n",
    "k.yaml": "include: c.yaml\ndoc_to_text: only the name of its include\n",
    "l.yaml": "doc_to_text: a template\n",
    "m.yaml": "task: 20\n",
    "n.yaml": "task: [x, y]\n",
    "o.yaml": "  task: eight\n  tag: hard\n",
    "p.yaml": "task: a (b)\n",
    "sub/q.yaml": "group: grouped\ntask: nine\n",
    "__pycache__/r.yaml": "task: cached\n",
    "s.yml": "task: other_suffix\n",
    "t.yaml": "task: yes\n",
    "u.yaml": "task: hidden_by_a_tag\ntag: seven\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "tasks", FILES)


def shape(index: TaskIndex) -> dict[str, tuple[str, str | None, list[str]]]:
    return {
        name: (entry.kind, entry.file and entry.file.name, sorted(entry.tasks)) for name, entry in index.entries.items()
    }


def test_what_each_name_is(folder):
    found = shape(TaskIndex([folder]))
    assert found["one"] == ("task", "a.yaml", [])  # the first of two files
    assert found["easy"] == ("tag", None, ["four", "one", "seven", "two"])
    assert found["hard"] == ("tag", None, ["eight", "three", "two"])
    assert found["all"] == ("group", "f.yaml", [])
    assert found["five"] == ("class", "g.yaml", [])
    assert {"four", "six", "seven", "eight", "a (b)", "grouped"} <= found.keys()
    assert not {"not_this", "none", "cached", "other_suffix", "not_of_groups", "second"} & found.keys()


@needs_harness
def test_the_index_is_the_harnesss(folder):
    from lm_eval.tasks._index import TaskIndex as Theirs

    kinds = {"TASK": "task", "PY_TASK": "class", "GROUP": "group", "TAG": "tag"}
    theirs = {
        name: (kinds[entry.kind.name], entry.yaml_path and entry.yaml_path.name)
        for name, entry in Theirs.build([folder]).items()
        if isinstance(name, str)
    }
    ours = shape(TaskIndex([folder]))
    assert {name: entry[:2] for name, entry in ours.items()} == theirs
    tags = {name: sorted(Theirs.build([folder])[name].tags) for name in theirs if theirs[name][0] == "tag"}
    assert {name: ours[name][2] for name in tags} == tags


def test_a_name_of_a_later_folder_replaces_that_of_an_earlier(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.yaml").write_text("task: one\ntag: easy\n")
    found = shape(TaskIndex([folder, other]))
    assert found["one"] == ("task", "mine.yaml", [])
    assert found["easy"] == ("tag", None, ["one"])


def test_a_file_that_cannot_be_read_is_remembered_with_its_reason(folder):
    (folder / "bad.yaml").write_text("include: missing.yaml\ntask: bad\n")
    (folder / "worse.yaml").write_text("doc_to_text: [\n")
    index = TaskIndex([folder])
    assert [path.name for path in index.unreadable] == ["bad.yaml", "worse.yaml"]
    assert "2 files could not be read, the first: " in index.hint("bad")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(EvalError, match=r"none: no such folder"):
        index_of([tmp_path / "none"])


@needs_harness
def test_the_installed_harness_is_indexed_in_seconds_without_importing_it():
    folder = installed_folder()
    assert folder is not None
    began = time.process_time()
    index = TaskIndex([folder])
    assert time.process_time() - began < 5  # 2 s where this was written
    assert index["mmlu"].kind == "group" and index["arc_easy"].kind == "task" and index["squadv2"].kind == "class"
    assert index["ai2_arc"].tasks == {"arc_easy", "arc_challenge"}
    assert not index.unreadable


@needs_harness
@pytest.mark.slow
def test_every_name_of_the_installed_harness():
    from lm_eval.tasks._index import TaskIndex as Theirs

    folder = installed_folder()
    assert folder is not None
    kinds = {"TASK": "task", "PY_TASK": "class", "GROUP": "group", "TAG": "tag"}
    theirs = {
        name: (kinds[entry.kind.name], entry.yaml_path, entry.tags if entry.kind.name == "TAG" else set())
        for name, entry in Theirs.build([folder]).items()
    }
    ours = TaskIndex([folder]).entries
    assert {
        name: (entry.kind, entry.file, entry.tasks if entry.kind == "tag" else set()) for name, entry in ours.items()
    } == theirs
