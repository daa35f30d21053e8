"""A folder of task files, whole, beside lm-evaluation-harness' own evaluator: names, groups, code that shuffles, scores."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval.lm_eval.groups import Group, by_name
from llmtrain.eval.lm_eval.index import TaskIndex
from llmtrain.eval.lm_eval.task import make_task
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from tests.support.icl import ask, byte_level, some_sentence
from tests.support.task_files import write_files

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

BASE = """
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl}}}}
training_split: train
validation_split: train
output_type: multiple_choice
doc_to_text: "Q: {{{{Question}}}} {{{{choice1}}}} or {{{{choice2}}}}\\nA:"
doc_to_choice: ["(A)", "(B)", "(C)", "(D)"]
doc_to_target: answer
"""
FILES = {
    "gpqa.yaml": "include: base\ntask: mine\nprocess_docs: !function utils.process_docs\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_mutual_info}]\n",
    "cloze.yaml": "include: base\ntask: cloze\noutput_type: loglikelihood\ndoc_to_choice: null\n"
    "doc_to_text: '{{Question}}'\ndoc_to_target: ' {{choice1}}'\n",
    "all.yaml": "group: all\ntask: [mine, {task: cloze, num_fewshot: 2, description: 'Go on.'}]\n"
    "aggregate_metric_list: [{metric: acc}, {metric: acc_norm, weight_by_size: false}]\n",
}
COLUMNS = ("Question", "choice1", "choice2", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tests.support import harness as oracle

    rng = random.Random(3)
    rows = [{name: some_sentence(rng, 4) for name in (*COLUMNS, "Correct Answer")} for _ in range(15)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    utils = (oracle.TASKS / "gpqa/zeroshot/utils.py").read_text()
    return write_files(tmp_path, {**FILES, "base": BASE.format(folder=tmp_path), "utils.py": utils})


def test_a_group_of_tasks(folder, tmp_path, monkeypatch):
    import lm_eval
    from transformers import AutoTokenizer

    from llmtrain.eval.lm_eval.scores import aggregate_group
    from tests.support import harness as oracle

    (tokenizer := byte_level()).save(tmp_path / "tokenizer")
    theirs: Any = oracle.Harness(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    theirs.get_model_info = dict
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    evaluate: Any = lm_eval.simple_evaluate
    results = evaluate(theirs, tasks=["all"], task_manager=manager, bootstrap_iters=10, limit=9)

    # The library keeps what process_docs has made: ours is to shuffle by itself.
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    [group] = by_name("all", TaskIndex([folder]))
    assert isinstance(group, Group)
    asked, measured = [], {}
    for leaf in group.leaves():
        task = make_task(leaf.settings, leaf.file, allow_code=[folder])
        documents = task.documents(9)
        requests = task.requests(documents, tokenizer)
        asked += [(one.context, one.continuation) for one in requests if isinstance(one, LoglikelihoodRequest)]
        measured[leaf.name] = task.metrics(documents, requests, ask(requests))
    assert asked == theirs.asked and len(asked) == 9 * 8 + 9
    samples = sorted(results["samples"]["mine"], key=lambda one: one["doc_id"])
    harness = make_task(group.leaves()[0].settings, folder / "gpqa.yaml", allow_code=[folder]).documents(9)
    assert [one.record for one in harness.evaluated] == [one["doc"] for one in samples]
    rows = {name: one.values for name, one in measured.items()}
    rows["all"] = {name: one.estimate for name, one in aggregate_group(group, measured).items()}
    for name, values in rows.items():
        found = results["results"][name]
        assert {f"{metric},none" for metric in values} == {
            key for key in found if key.endswith(",none") and "_stderr" not in key
        }
        for metric, value in values.items():
            assert value.value == pytest.approx(found[f"{metric},none"], rel=1e-12), (name, metric)
            if metric.startswith("acc"):
                assert value.stderr == pytest.approx(found[f"{metric}_stderr,none"], rel=1e-12)
