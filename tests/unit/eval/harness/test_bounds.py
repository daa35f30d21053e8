"""Task files that would not end, or that reach further than their data: each is bounded, and says why."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval import native_task
from llmtrain.eval.errors import EvalError, time_limit
from llmtrain.eval.lm_eval import task as tasks
from llmtrain.eval.lm_eval.groups import by_name
from llmtrain.eval.lm_eval.index import TaskIndex
from llmtrain.eval.lm_eval.task import LmEvalTask, make_task
from llmtrain.eval.lm_eval.yaml_file import read_task_file
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood
from llmtrain.eval.task_names import TaskNames
from llmtrain.eval.tasks import templates
from tests.support.icl import byte_level
from tests.support.task_files import write_files
from tests.unit.eval.harness.test_task import CHOICES, ROWS, TEXT, task, write

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BACKTRACKING = "(a+)+$"


@pytest.fixture
def brief(monkeypatch) -> None:
    """Limits of a fraction of a second."""
    for module in (tasks, templates, native_task):
        monkeypatch.setattr(module, "DOCUMENT_SECONDS", 0.2)
    monkeypatch.setattr(tasks, "_FILTER_SECONDS", 0.2)


def test_a_loop_of_a_template_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "DOCUMENT_SECONDS", 1.0)  # which the documents before have, too
    made = task(tmp_path, doc_to_text="{{question}}{% if question == 'is 3 odd?' %}" + LOOP + "{% endif %}")
    documents = made.documents()
    with pytest.raises(EvalError, match=r"\[test\]:4: its prompt took longer than 1 s; a loop or a regular expression"):
        made.requests(documents, byte_level(), 0)


def test_a_loop_in_the_first_document_ends(tmp_path, brief):
    with pytest.raises(EvalError, match=r"task it: a template took longer than 0\.2 s"):
        task(tmp_path, doc_to_text=LOOP).documents()


def test_a_regular_expression_of_a_template_ends(tmp_path, brief):
    template = "{{ (question ~ 'a' * 40 ~ '!') | regex_replace('" + BACKTRACKING + "', '') }}"
    with pytest.raises(EvalError, match=r"took longer than 0\.2 s"):
        task(tmp_path, doc_to_text=template).documents()


def test_a_regular_expression_of_a_filter_ends(tmp_path, brief):
    chain = [{"function": "regex", "regex_pattern": BACKTRACKING}, {"function": "take_first"}]
    made = task(tmp_path, TEXT, filter_list=[{"name": "x", "filter": chain}])
    documents = made.documents()
    requests = made.requests(documents, byte_level(), 0)
    with pytest.raises(EvalError, match="task it: filter_list: a filter took longer than "):
        made.metrics(documents, requests, [GeneratedText("a" * 40 + "!")] * len(requests))


def test_a_regular_expression_of_a_metric_ends(tmp_path, brief):
    metric = {"metric": "exact_match", "aggregation": "mean", "regexes_to_ignore": [BACKTRACKING]}
    made = task(tmp_path, TEXT, metric_list=[metric])
    documents = made.documents()
    requests = made.requests(documents, byte_level(), 0)
    with pytest.raises(EvalError, match=r"\[test\]:1: metric_list: a metric took longer than 0\.2 s"):
        made.metrics(documents, requests, [GeneratedText("a" * 40 + "!")] * len(requests))


KEYWORD = {"keyword": BACKTRACKING, "frequency": 1, "relation": "at least"}


@pytest.mark.parametrize(
    ("record", "settings"),
    [
        ({}, {"type": "generation", "lm_eval": {"extract": {"x": {"pattern": BACKTRACKING}}}}),
        ({}, {"type": "generation", "lm_eval": {"ignore": [BACKTRACKING]}}),
        ({"prompt": "q", "instruction_id_list": ["keywords:frequency"], "kwargs": [KEYWORD]}, {"type": "instructions"}),
    ],
)
def test_a_regular_expression_of_an_own_task_ends(tmp_path, brief, record, settings):
    (tmp_path / "x.jsonl").write_text(json.dumps({"context": "q", "answer": "a"} | record))
    content = {"name": "x", "source": {"path": "x.jsonl"}, "conventions": ["lm-eval"]}
    (tmp_path / "x.yaml").write_text(json.dumps(content | settings))
    made = load_task(tmp_path / "x.yaml", "lm-eval")
    documents = made.documents()
    requests = made.requests(documents, byte_level(), 0)
    with pytest.raises(EvalError, match=r"x\.jsonl:1: its answer's extraction and comparison took longer than 0\.2 s"):
        made.metrics(documents, requests, [GeneratedText("a" * 40 + "!")])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, r"took longer than 0\.2 s"),
        ("{{ 'x' * 9999999999 }}", "would make 9,999,999,999 characters"),
        ("{{ [1, 2] * 9999999999 }}", "would make 19,999,999,998 characters"),
        ("{{ 'x'.ljust(1000) }}", "would make 1,000 characters"),
    ],
)
@pytest.mark.parametrize("place", ["fields", "query"])
def test_the_first_document_beyond_a_limit_ends_an_own_task(tmp_path, brief, monkeypatch, template, reason, place):
    monkeypatch.setattr(templates, "DOCUMENT_CHARACTERS", 999)
    (tmp_path / "x.jsonl").write_text('{"query": "q", "choices": ["a", "b"], "gold": 0}\n' * 50)
    source = {"path": "x.jsonl"} | ({"fields": {"query": template}} if place == "fields" else {})
    content = {"name": "x", "type": "multiple_choice", "source": source, "conventions": ["lm-eval"]}
    (tmp_path / "x.yaml").write_text(json.dumps(content | ({"query": template} if place == "query" else {})))
    began = time.monotonic()
    with pytest.raises(EvalError, match=rf"task x: .*x\.jsonl:1: .*{reason}"):
        load_task(tmp_path / "x.yaml", "lm-eval").documents()
    assert time.monotonic() - began < 5


def test_a_timer_that_runs_already_goes_on():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *given: rung.append(given))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        with pytest.raises(EvalError, match=re.escape("this took longer than 0.05 s")), time_limit(0.05, "this"):
            time.sleep(100)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        assert not rung and 0 < left <= 1000 - 0.05
        signal.raise_signal(signal.SIGALRM)
        assert len(rung) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("include", ["pipe", "/dev/zero"])
def test_a_pipe_or_a_device_is_no_file_to_include(tmp_path, include):
    os.mkfifo(tmp_path / "pipe")
    write_files(tmp_path, {"a.yaml": f"include: {include}\ntask: a\n", "b.yaml": "task: b\n"})
    with pytest.raises(EvalError, match="not a regular file"):
        read_task_file(tmp_path / "a.yaml")
    index = TaskIndex([tmp_path])
    assert list(index.entries) == ["b"] and "not a regular file" in str(index.unreadable)
    with pytest.raises(EvalError, match="not a regular file"):
        TaskNames().find(str(tmp_path / "a.yaml"))


def code(folder: Path, text: str, key: str, reference: str, allow: Path, **changes: Any) -> LmEvalTask:
    """Task of a file in FOLDER/deep that names code."""
    lines = [
        f"{name}: {json.dumps(value)}\n"
        for name, value in (CHOICES | changes).items()
        if name != key and value is not None
    ]
    write_files(folder, {"utils.py": text, "deep/it.yaml": "".join(lines) + f"{key}: !function {reference}\n"})
    write(folder / "some/data/small/test.jsonl")
    [leaf] = by_name("it", TaskIndex([folder]))
    return make_task(leaf.settings, leaf.file, data_dir=folder, allow_code=[allow])  # type: ignore[union-attr]


def test_a_function_of_another_folder_is_found_and_allowed_by_that_folder(tmp_path):
    text = "def asked(record):\n    return 'Is it? ' + record['question']\n"
    made = code(tmp_path, text, "doc_to_text", "../utils.asked", tmp_path)
    assert made.documents().evaluated[0].text == "Is it? is 0 odd? no"
    with pytest.raises(EvalError, match=re.escape(f"--allow-code {tmp_path} runs it")):
        code(tmp_path, text, "doc_to_text", "../utils.asked", tmp_path / "deep")


@pytest.mark.parametrize("given", ["np.int32(record['label'])", "np.array(record['label'])"])
def test_the_number_of_a_choice_may_be_numpys(tmp_path, given):
    text = f"import numpy as np\ndef right(record):\n    return {given}\n"
    made = code(tmp_path, text, "doc_to_target", "../utils.right", tmp_path)
    documents = made.documents()
    requests = made.requests(documents, byte_level(), 2)
    assert len(requests) == 2 * len(ROWS) and documents.evaluated[1].text == "Q: is 1 odd?\nA: yes"


@pytest.mark.parametrize("given", ["np.array([record['label'], 0])", "[np.int64(record['label']), 0]"])
def test_several_numbers_of_choices_may_be_numpys(tmp_path, given):
    text = f"import numpy as np\ndef right(record):\n    return {given}\n"
    made = code(tmp_path, text, "doc_to_target", "../utils.right", tmp_path)
    documents = made.documents()
    requests = made.requests(documents, byte_level(), 0)
    result = made.metrics(
        documents, requests, [Loglikelihood(-float(number % 2), False, 1) for number in range(len(requests))]
    )
    assert (result.documents, result.score.value) == (len(ROWS), 1.0)


def test_code_that_shuffles_does_so_as_at_the_begin_of_the_harness(tmp_path, monkeypatch):
    """Its evaluator sets the seed of `random` to 0 before it loads tasks. The state of our process stays as it was."""
    import random

    text = "import random\ndef mixed(rows):\n    order = list(range(len(rows)))\n    random.shuffle(order)\n"
    made = code(tmp_path, text + "    return rows.select(order)\n", "process_docs", "../utils.mixed", tmp_path)
    random.seed(77)
    found = [one.record["question"] for one in made.documents().evaluated]
    after = random.random()
    expected, generator = [row["question"] for row in ROWS], random.Random(0)
    generator.shuffle(expected)
    assert found == expected and after == random.Random(77).random()


def test_no_template_is_rendered_outside_of_the_sandbox(tmp_path, monkeypatch):
    """lm_eval's own environment lets a template run any program."""
    import lm_eval.utils

    def fail(*given: Any) -> None:
        raise AssertionError("rendered by lm_eval")

    monkeypatch.setattr(lm_eval.utils, "apply_template", fail)
    examples = {"samples": ROWS[:2], "sampler": "first_n", "gen_prefix": "{{'So'}}"}
    more = {"description": "{{question}}!", "gen_prefix": "{{'Thus'}}", "fewshot_config": examples}
    for settings in (CHOICES, TEXT, {**TEXT, "output_type": "loglikelihood_rolling", "metric_list": None}):
        made = task(tmp_path, settings | {"doc_to_choice": settings["doc_to_choice"] and "{{['no', 'yes']}}"}, **more)
        documents = made.documents()
        assert made.requests(documents, byte_level(), 0 if made.rolling else 2, max_seq_len=512)
        assert documents.evaluated[0].text
