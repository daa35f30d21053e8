"""Translation of lm-evaluation-harness's tasks into ours: every setting is translated or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.yaml_source import read_file
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.convert import as_yaml, own_settings, own_task
from llmtrain.eval.lm_eval_tasks.yaml_file import Function

FILE = Path("tasks/t.yaml")
CHOICE: dict[str, Any] = {
    "task": "t",
    "dataset_path": "owner/data",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "gold",
    "doc_to_choice": "{{options}}",
}
TEXT = CHOICE | {"output_type": "generate_until", "doc_to_choice": None}


def made(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    found = own_settings(settings | changes, FILE)
    own_task(found, "t")
    return found


def test_a_task_of_choices():
    assert made(CHOICE, dataset_name="en", num_fewshot=5, description="Answer.\n\n", fewshot_split="train") == {
        "name": "t",
        "type": "multiple_choice",
        "source": {"hub": "owner/data", "split": "test", "config": "en", "few_shot": {"split": "train"}},
        "query": "{{q}}",
        "choices": "{{options}}",
        "gold": "{{gold}}",
        "preamble": "Answer.\n\n",
        "shots": [5],
    }


@pytest.mark.parametrize(
    ("changes", "where", "expected"),
    [
        ({"doc_to_text": "question"}, "query", "{{question}}"),
        ({"doc_to_text": "The Question"}, "query", '{{record.get("The Question", "The Question")}}'),
        ({"doc_to_text": "Is this right:\n"}, "query", "Is this right:\n"),
        (
            {"description": "hint"},
            "preamble",
            '{{record.get("hint", "hint")}}',
        ),  # the text where no column has that name
        ({"doc_to_target": 3}, "gold", "3"),
        ({"doc_to_choice": ["no", "yes"]}, "choices", ["no", "yes"]),
        ({"doc_to_choice": {"a": "x", "b": "y"}}, "choices", ["x", "y"]),
        ({"metric_list": [{"metric": "acc_norm"}, {"metric": "acc"}]}, "lm_eval.metric", "acc_per_char"),
        ({"metric_list": [{"metric": "acc_mutual_info"}]}, "pmi", ""),
        ({"target_delimiter": ""}, "lm_eval.continuation_delimiter", ""),
        ({"fewshot_delimiter": "\n"}, "lm_eval.example_delimiter", "\n"),
        ({"fewshot_config": {"sampler": "first_n"}}, "lm_eval.sampler", "first_n"),
        ({}, "lm_eval.avoid_document", False),  # its examples are from the test split, which it does not name for them
        ({"fewshot_split": "test"}, "lm_eval", None),
        ({"test_split": None, "validation_split": "dev", "training_split": "train"}, "lm_eval.avoid_document", True),
        ({"validation_split": "dev"}, "source.few_shot.split", "dev"),
    ],
)
def test_settings_of_choices(changes, where, expected):
    found: Any = made(CHOICE, **changes)
    for key in where.split("."):
        found = found.get(key) if found else None
    assert found == expected


def test_a_task_of_generated_answers():
    filters = [
        {"name": "strict", "filter": [{"function": "regex", "regex_pattern": "a(.)"}, {"function": "take_first"}]}
    ]
    metric = {"metric": "exact_match", "aggregation": "mean", "ignore_case": True, "regexes_to_ignore": [","]}
    kwargs = {"until": ["\n"], "max_gen_toks": 9, "do_sample": False, "temperature": 0}
    found = made(TEXT, filter_list=filters, metric_list=[metric], generation_kwargs=kwargs)
    assert found["lm_eval"] == {
        "avoid_document": False,
        "stops": ["\n"],
        "max_new_tokens": 9,
        "ignore_case": True,
        "ignore": [","],
        "extract": {"strict": {"pattern": "a(.)"}},
    }
    assert (found["context"], found["answer"]) == ("{{q}}", "{{gold}}")


def test_local_files(tmp_path):
    files = {"test": ["a.jsonl"], "train": "b.jsonl"}
    found = made(CHOICE, dataset_path="json", dataset_kwargs={"data_files": files}, fewshot_split="train")
    here = Path.cwd()
    assert found["source"] == {"path": str(here / "a.jsonl"), "few_shot": {"path": str(here / "b.jsonl")}}


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        (CHOICE, {"process_docs": Function("utils.f", Path("utils.py"))}, "process_docs: !function utils.f: code"),
        (CHOICE, {"doc_to_text": Function("u.f", Path("u.py"))}, "doc_to_text: !function u.f: code"),
        (CHOICE, {"doc_to_text": "{{label}}"}, "doc_to_text: {{label}}: may be a number, which chooses one of several"),
        (CHOICE, {"doc_to_text": 0}, "doc_to_text: 0: may be a number"),
        (CHOICE, {"output_type": "other"}, "output_type: other: there are multiple_choice"),
        (CHOICE, {"metric_list": [{"metric": "f1"}]}, "metric_list: f1: a multiple_choice task has acc, acc_norm"),
        (
            CHOICE,
            {"metric_list": [{"metric": "acc", "aggregation": "median"}]},
            "metric_list: acc: aggregation: median",
        ),
        (CHOICE, {"doc_to_choice": "['{{a}}', '{{b}}']"}, "doc_to_choice: ['{{a}}', '{{b}}']: a list must be one"),
        (CHOICE, {"doc_to_choice": None}, "doc_to_choice: missing"),
        (CHOICE, {"gen_prefix": "Answer:"}, "gen_prefix: has no counterpart"),
        (CHOICE, {"use_prompt": "promptsource:x"}, "use_prompt: is a prompt of another package"),
        (CHOICE, {"dataset_kwargs": {"revision": "x"}}, "dataset_kwargs.revision: has no counterpart"),
        (CHOICE, {"dataset_path": "csv"}, "dataset_path: csv: only one JSONL file"),
        (CHOICE, {"dataset_path": None}, "dataset_path: missing; nothing says where the data are"),
        (CHOICE, {"test_split": None}, "test_split: missing"),
        (CHOICE, {"fewshot_config": {"samples": [{"q": "a"}]}}, "fewshot_config.samples: "),
        (CHOICE, {"fewshot_config": {"doc_to_text": "x"}}, "fewshot_config.doc_to_text: x: examples are written as"),
        (CHOICE, {"repeats": 3}, "repeats: 3: an answer is generated once"),
        (CHOICE, {"filter_list": []}, "filter_list: filters are for answers that are generated"),
        (CHOICE, {"tsak": 1}, "tsak: is no setting of lm-evaluation-harness"),
        (TEXT, {"generation_kwargs": {"do_sample": True, "temperature": 0.7}}, "do_sample with temperature 0.7"),
        (TEXT, {"generation_kwargs": {"temperature": 0.7}}, "do_sample with temperature 0.7"),
        (TEXT, {"generation_kwargs": {"do_sample": True}}, "generation_kwargs.do_sample: answers cannot be drawn at"),
        (TEXT, {"generation_kwargs": {"repetition_penalty": 1.2}}, "repetition_penalty: answers are greedy"),
        (TEXT, {"generation_kwargs": {"min_p": 0.1}}, "generation_kwargs.min_p: not supported"),
        (
            TEXT,
            {"filter_list": [{"name": "x", "filter": [{"function": "majority_vote"}]}]},
            "filter_list: x: majority_vote",
        ),
        (
            TEXT,
            {"metric_list": [{"metric": "exact_match", "ignore_numbers": True}]},
            "exact_match: ignore_numbers has no",
        ),
        (TEXT, {"doc_to_choice": ["a"]}, "doc_to_choice: with output_type generate_until"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(settings, changes, said):
    with pytest.raises(EvalError) as error:
        made(settings, **changes)
    assert said in str(error.value) and str(error.value).startswith(
        "task t of tasks/t.yaml: a task of ours cannot say\n"
    )


def test_all_refusals_come_at_once():
    with pytest.raises(EvalError) as error:
        made(CHOICE, gen_prefix="x", repeats=2, use_prompt="y")
    assert str(error.value).count("\n") == 3


@pytest.mark.parametrize("text", ["no", "on", "a: b", "# c", "é\n\t\"'\\", "1e-4", "null", " x ", "-", "[a"])
def test_the_yaml_is_read_as_it_was_meant(text, tmp_path):
    settings = made(CHOICE, doc_to_choice=[text, "other"], description=text, fewshot_delimiter=text)
    file = tmp_path / "t.yaml"
    file.write_text(as_yaml(settings, "here"))
    assert read_file(file).data == settings
