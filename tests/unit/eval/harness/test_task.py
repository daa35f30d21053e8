"""Tasks of lm-evaluation-harness: what is refused by name, local data, code, and examples; scores are in tests/numerics."""

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.task import LmEvalTask, make_task
from llmtrain.eval.lm_eval.yaml_file import Function
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest, Loglikelihood

CHOICES = {
    "task": "it",
    "dataset_path": "some/data",
    "dataset_name": "small",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": ["no", "yes"],
    "doc_to_target": "label",
}
TEXT = CHOICES | {"output_type": "generate_until", "doc_to_choice": None, "doc_to_target": "{{label}}"}
ROWS = [{"question": f"is {number} odd?", "label": number % 2} for number in range(6)]


def write(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def task(folder: Path, settings: dict[str, Any] = CHOICES, **changes: Any) -> LmEvalTask:
    """Task whose data are ROWS."""
    if not (folder / "some").exists():
        write(folder / "some/data/small/test.jsonl")
    return make_task(settings | changes, folder / "it.yaml", data_dir=folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"doc_to_txt": "x"}, "doc_to_txt: unknown; did you mean doc_to_text?"),
        ({"use_prompt": "promptsource:x"}, "use_prompt: prompts of the promptsource library are not supported"),
        ({"doc_to_image": ["image"]}, "doc_to_image: images are not supported"),
        ({"class": "X"}, "class: the task is a Python class"),
        ({"unsafe_code": True}, "unsafe_code: the task runs code that a model writes"),
        ({"num_fewshot": "many"}, "num_fewshot: expected a number, found 'many'"),
        ({"num_fewshot": -1}, "num_fewshot: -1; expected at least 0"),
        ({"repeats": 10**11}, "repeats: 100000000000; expected at most 10,000"),
        ({"output_type": "generate"}, "output_type: 'generate'; did you mean generate_until?"),
        ({"doc_to_choice": None}, "doc_to_choice: missing"),
        ({"test_split": None}, "test_split: missing"),
        ({"dataset_path": None}, "dataset_path: missing"),
        ({"doc_to_text": "{{question"}, "doc_to_text: not a template"),
        ({"metric_list": [{"metric": "rouge"}]}, "metric_list.0: rouge needs an aggregation"),
        ({"metric_list": [{"metric": "acc", "aggregation": "average"}]}, "there is no aggregation 'average'"),
        ({"dataset_kwargs": {"cache_dir": "/"}}, "dataset_kwargs.cache_dir: a task's file may not say where files are"),
        ({"metric_list": []}, "metric_list: empty"),
        ({"filter_list": [{"name": "x", "filter": [{"function": "lowercase"}]}]}, "filters are for texts"),
        (
            {"fewshot_config": {"sampler": "balanced"}},
            "fewshot_config.sampler: 'balanced'; expected default or first_n",
        ),
        ({"fewshot_config": {"sampel": 1}}, "fewshot_config.sampel: unknown; did you mean sample"),
        ({"fewshot_config": {"samples": ["x"]}}, "fewshot_config.samples: expected a list of mappings"),
    ],
)
def test_refused_by_name(changes, expected):
    with pytest.raises(EvalError, match=re.escape(expected)) as error:
        make_task(CHOICES | changes, Path("it.yaml"))
    assert str(error.value).startswith("task it: ")


def filtered(*filters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"filter_list": [{"name": "x", "filter": [*filters]}]} | more


def matched(**settings: Any) -> dict[str, Any]:
    return {"metric_list": [{"metric": "exact_match", **settings}]}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"generation_kwargs": {"untill": ["x"]}}, "generation_kwargs.untill: not supported; did you mean until?"),
        (matched(ignore_cases=True), "has no setting 'ignore_cases'"),
        (matched(regexes_to_ignore=["("]), "'(' is not a regular expression"),
        (matched(regexes_to_ignore=".,"), "regexes_to_ignore: expected a list of regular"),
        (matched(regexes_to_ignore=[1]), "expected a regular expression, found 1"),
        ({"metric_list": [{"metric": "f1", "hf_evaluate": True}]}, "of the `evaluate` library (hf_evaluate)"),
        (filtered({"function": "regexp"}), "no filter 'regexp'; did you mean regex"),
        (filtered({"function": "regex", "pattern": "x"}), "no setting 'pattern'"),
        (filtered({"function": "regex", "regex_pattern": "("}), "not a regular"),
        (
            filtered({"function": "regex", "regex_pattern": ["a", "b"]}),
            "filter_list.0.filter: regex: expected a regular expression, found ['a', 'b']",
        ),
        (filtered({"function": "custom"}), "custom needs filter_fn"),
        (filtered({"function": "take_first_k", "k": 0}), "take_first_k needs k, a number of answers"),
        (filtered({"function": "take_first_k", "k": True}), "take_first_k needs k, a number of answers"),
        (
            filtered({"function": "map", "mapping_dict": {True: 1}}),
            "the key True is no text, and no answer can equal it; put yes",
        ),
        (
            filtered({"function": "map", "mapping_dict": {1: "a"}}),
            "the key 1 is no text, and no answer can equal it; put it in quotes",
        ),
        (
            filtered({"function": "map", "mapping_dict": ["yes"]}),
            "map needs mapping_dict, a mapping of answers, found ['yes']",
        ),
        (filtered({"function": "map"}), "map needs mapping_dict, a mapping of answers, found None"),
        (
            filtered({"function": "multi_choice_regex", "regexes_to_ignore": ".,"}),
            "regexes_to_ignore: expected a list of regular expressions, found '.,'",
        ),
        (
            {"filter_list": [{"name": "x", "filter": [{"function": one}]} for one in ("lowercase", "uppercase")]},
            "filter_list: two chains are called 'x'",
        ),
    ],
)
def test_refused_settings_of_generation(changes, expected):
    with pytest.raises(EvalError, match=re.escape(expected)) as error:
        make_task(TEXT | changes, Path("it.yaml"))
    assert str(error.value).startswith("task it: ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metric_list": [{"metric": "perplexity"}]}, "no metric 'perplexity' of a multiple_choice task; it gives "),
        ({"metric_list": [{"metric": "f1", "aggregation": "mean"}]}, "metric_list: f1: mean cannot be taken of what"),
        ({**TEXT, "metric_list": [{"metric": "acc"}]}, "metric_list: acc: mean cannot be taken of what its documents"),
        (
            {
                **TEXT,
                "doc_to_target": "{{['a', 'b', 'c']}}",
                "metric_list": [{"metric": "exact_match"}, {"metric": "f1"}],
            },
            "metric_list: f1: f1_score cannot be taken of what its documents give",
        ),
        (
            {"doc_to_choice": [*"abc"], "doc_to_target": "{{label * 2}}", "metric_list": [{"metric": "f1"}]},
            "metric_list: f1: f1_score cannot be taken of what its documents give: Target is multiclass",
        ),
    ],
)
def test_metrics_that_cannot_be_computed_are_refused_before_a_model_is_asked(tmp_path, changes, expected):
    with pytest.raises(EvalError, match=re.escape(expected)) as error:
        task(tmp_path, **changes).documents()
    assert str(error.value).startswith("task it: metric_list: ")


def test_all_errors_at_once():
    with pytest.raises(EvalError) as error:
        make_task(CHOICES | {"doc_to_txt": "x", "repeats": "two", "use_prompt": "x"}, Path("it.yaml"))
    assert all(key in str(error.value) for key in ("doc_to_txt", "repeats", "use_prompt"))


def test_code_runs_only_from_allowed_folders(tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    for folder in (allowed, other):
        folder.mkdir()
        (folder / "utils.py").write_text(
            "def asked(record):\n    return 'Is it? ' + record['question']\n", encoding="utf-8"
        )
    write(tmp_path / "some/data/small/test.jsonl")

    def made(folder: Path, allow: list[Path]) -> LmEvalTask:
        function = Function("utils.asked", folder / "utils.py")
        settings = CHOICES | {"doc_to_text": function, "doc_to_decontamination_query": function}
        return make_task(settings, folder / "it.yaml", data_dir=tmp_path, allow_code=allow)

    reason = f"doc_to_text is code (utils.asked of {other / 'utils.py'}); --allow-code {other} runs it"
    for allow in ([], [allowed], [other / "utils"]):
        with pytest.raises(EvalError, match=re.escape(f"task it: {reason}")):
            made(other, allow)
    [document, *_] = made(allowed, [tmp_path]).documents().evaluated
    assert document.text == "Is it? is 0 odd? no"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import nothing_of_this_name\n", "cannot be imported: No module named 'nothing_of_this_name'"),
        ("raise SystemExit('no prolog')\n", "cannot be imported: no prolog"),
        ("asked = 3\n", "defines no function asked"),
        ("def asked(record):\n    return record['nothing']\n", "`doc_to_text`: 'nothing'"),
        ("def asked(record):\n    return 3.5\n", "`doc_to_text` gives 3.5; expected a text"),
    ],
)
def test_code_that_fails_is_an_error_of_the_task(tmp_path, tokenizer, code, expected):
    (tmp_path / "utils.py").write_text(code, encoding="utf-8")
    write(tmp_path / "some/data/small/test.jsonl")
    settings = CHOICES | {"doc_to_text": Function("utils.asked", tmp_path / "utils.py")}
    made = make_task(settings, tmp_path / "it.yaml", data_dir=tmp_path, allow_code=[tmp_path])
    with pytest.raises(EvalError, match=re.escape(expected)):
        made.requests(made.documents(), tokenizer, 0)


def test_data_folder(tmp_path):
    """FOLDER/TASK/SPLIT.jsonl comes before FOLDER/DATASET/CONFIG/SPLIT.jsonl; nothing else is taken silently."""
    assert len(task(tmp_path).documents()) == 6
    assert len(task(tmp_path).documents(limit=2)) == 2
    assert task(tmp_path).documents().evaluated[1].where == "some/data (small) [test]:2"
    with pytest.raises(
        EvalError, match=re.escape(f"task it: {tmp_path}/some/data/small has no split 'dev'; there are test")
    ):
        task(tmp_path, test_split="dev").documents()
    with pytest.raises(EvalError, match=re.escape(f"task it: there is no data folder {tmp_path}/nowhere")):
        make_task(CHOICES, tmp_path / "it.yaml", data_dir=tmp_path / "nowhere").documents()
    looked = f"looked for {tmp_path}/it/SPLIT.jsonl or {tmp_path}/some/data/large/SPLIT.jsonl"
    with pytest.raises(EvalError, match=re.escape(looked)):
        task(tmp_path, dataset_name="large").documents()
    write(tmp_path / "it/test.jsonl", ROWS[:1])
    assert len(task(tmp_path).documents()) == 1


def test_files_beside_the_task(tmp_path, monkeypatch):
    """As in the harness, relative paths are below the current folder; of those that are not, below the task's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    write(tmp_path / "tasks/rows.jsonl")
    files = {"data_files": {"test": "rows.jsonl"}}
    settings = CHOICES | {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
    assert len(make_task(settings, tmp_path / "tasks/it.yaml").documents()) == 6
    missing = settings | {"dataset_kwargs": files | {"data_files": {"test": "nothing.jsonl"}}}
    with pytest.raises(EvalError, match=r"task it: json: cannot be loaded: .*nothing.jsonl"):
        make_task(missing, tmp_path / "tasks/it.yaml").documents()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rows.jsonl", '{"question": "a", "label": 0}\n{"question": \n', "cannot be loaded: JSON parse error"),
        ("rows.jsonl", "", "cannot be loaded: there are no records in it"),
        ("rows.csv", "question,label\na,0\nb,1,2,3\n", "Expected 2 fields in line 3, saw 4"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(tmp_path, monkeypatch, name, text, expected):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / name).write_text(text, encoding="utf-8")
    files = {"data_files": {"test": str(tmp_path / name)}}
    builder = "csv" if name.endswith("csv") else "json"
    settings = CHOICES | {"dataset_path": builder, "dataset_name": None, "dataset_kwargs": files}
    with pytest.raises(EvalError, match=f"task it: {builder}: .*{re.escape(expected)}"):
        make_task(settings, tmp_path / "it.yaml").documents()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "task it: json: dataset_kwargs names no data_files"),  # the library would read the current folder
        ({"data_files": "rows.jsonl", "split": "train"}, "dataset_kwargs.split: the task's test_split"),
    ],
)
def test_dataset_kwargs_that_do_not_give_splits_of_named_files(tmp_path, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl")
    settings = CHOICES | {"dataset_path": "json", "dataset_name": None, "test_split": "train"}
    with pytest.raises(EvalError, match=expected):
        make_task(settings | {"dataset_kwargs": options}, tmp_path / "it.yaml").documents()


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ([False, True], "`doc_to_choice` gives [False, True]; expected a list of texts; put yes and no in quotes"),
        ([1, 2], "`doc_to_choice` gives [1, 2]; expected a list of texts"),
        ("{{[]}}", "`doc_to_choice` gives []; expected a list of texts"),
    ],
)
def test_choices_that_are_none(tmp_path, choices, expected):
    made = task(tmp_path, doc_to_choice=choices)
    with pytest.raises(EvalError, match=re.escape(f"task it: {expected}")):
        made.documents()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return None", "some/data (small) [test]: process_docs gives NoneType; lm-evaluation-harness takes a Dataset"),
        ("return ['a']", "some/data (small) [test]: process_docs gives list; lm-evaluation-harness takes a Dataset"),
        ("return rows.map(lambda one: 1 / 0)", "process_docs (made) failed: division by zero"),
        ("return rows.filter(lambda one: False)", "some/data (small) [test] holds no documents"),
    ],
)
def test_code_that_makes_no_records_is_an_error_of_the_task(tmp_path, code, expected):
    (tmp_path / "utils.py").write_text(f"def made(rows):\n    {code}\n", encoding="utf-8")
    write(tmp_path / "some/data/small/test.jsonl")
    settings = CHOICES | {"process_docs": Function("utils.made", tmp_path / "utils.py")}
    with pytest.raises(EvalError, match=re.escape(f"task it: {expected}")):
        make_task(settings, tmp_path / "it.yaml", data_dir=tmp_path, allow_code=[tmp_path]).documents()


def test_a_text_where_the_number_of_a_choice_is_needed(tmp_path, tokenizer):
    made = task(tmp_path, TEXT, doc_to_choice=["no", "yes"], doc_to_target="{{question}}")
    with pytest.raises(
        EvalError, match=r"\[test\]:1: `doc_to_target` gives 'is 0 odd\?'; with doc_to_choice, expected"
    ):
        made.requests(made.documents(), tokenizer, 0)


def test_a_record_that_does_not_fit(tmp_path, tokenizer):
    write(tmp_path / "some/data/small/test.jsonl", [*ROWS, {"question": "x"}])
    made = task(tmp_path, doc_to_text="{{question}} {{other}}")
    with pytest.raises(EvalError, match=re.escape("task it: `doc_to_text`: 'other' is undefined")):
        made.documents()
    made = task(tmp_path)
    with pytest.raises(EvalError, match=r"task it: some/data \(small\) \[test\]:7: .*`doc_to_target` gives None"):
        made.requests(made.documents(), tokenizer, 0)


def test_a_document_may_be_its_own_example(tmp_path, tokenizer):
    """As in the harness, where a task has a test_split and no other; not where examples come from it by name."""

    def has_itself(**changes: Any) -> bool:
        made = task(tmp_path, **changes)
        contexts = [tokenizer.decode(one.context) for one in made.requests(made.documents(), tokenizer, 5)]
        return any(context.count(context.rpartition("Q: ")[2]) > 1 for context in contexts)

    assert has_itself()
    assert not has_itself(fewshot_split="test")
    assert not has_itself(test_split=None, validation_split="test")
    with pytest.raises(EvalError, match="5 besides the document itself"):
        task(tmp_path, fewshot_split="test").requests(task(tmp_path).documents(), tokenizer, 6)


def test_metrics_have_the_harness_s_names(tmp_path, tokenizer):
    chains = [
        {"name": "none", "filter": [{"function": "take_first"}]},
        {"name": "digits", "filter": [{"function": "regex", "regex_pattern": "[0-9]"}, {"function": "take_first"}]},
    ]
    made = task(tmp_path, TEXT, filter_list=chains, repeats=3)
    assert made.measured() == ["exact_match", "exact_match,digits"] and made.metric == "exact_match"
    documents = made.documents()
    requests = made.requests(documents, tokenizer, 0)
    assert [one.document for one in requests] == [*range(6)]  # greedy answers are asked for once
    metrics = made.metrics(documents, requests, [GeneratedText(" it is 1\n\nQ")] * 6)
    assert {name: one.value for name, one in metrics.values.items()} == {"exact_match": 0.0, "exact_match,digits": 0.5}
    assert metrics.per_document[1].details["filtered"] == {"none": " it is 1", "digits": "1"}


def test_drawn_answers_are_asked_for_as_often_as_the_task_repeats_them(tmp_path, tokenizer):
    vote = [{"function": "regex", "regex_pattern": "[0-9]"}, {"function": "majority_vote"}, {"function": "take_first"}]
    chains = [{"name": "vote", "filter": vote}, {"name": "first", "filter": [{"function": "take_first"}]}]
    made = task(tmp_path, TEXT, filter_list=chains, repeats=3, generation_kwargs={"temperature": 0.8, "top_p": 0.9})
    documents = made.documents()
    requests = made.requests(documents, tokenizer, 0)
    drawn = [one for one in requests if isinstance(one, GenerateUntilRequest)]
    assert [(one.document, one.repeat) for one in drawn] == [(number // 3, number % 3) for number in range(18)]
    assert len({one.row_number for one in drawn}) == 18
    answers = [GeneratedText(text) for text in ("0", "it is 1", "1\n\nno: 0")] * 6
    metrics = made.metrics(documents, requests, answers)
    assert {name: one.value for name, one in metrics.values.items()} == {
        "exact_match,vote": 0.5,
        "exact_match,first": 0.5,
    }
    details = metrics.per_document[1].details
    assert details["filtered"] == {"vote": "1", "first": "0"}
    assert (details["text"], details["texts"]) == ("0", ["0", "it is 1", "1\n\nno: 0"])


def test_scores_of_the_choice_alone_can_be_left_out(tmp_path, tokenizer):
    made = task(tmp_path, metric_list=[{"metric": "acc"}, {"metric": "acc_mutual_info"}])
    documents = made.documents()
    assert len(made.requests(documents, tokenizer)) == 2 * len(made.requests(documents, tokenizer, pmi=False)) == 24
    assert made.measured(pmi=False) == ["acc"]
    requests = made.requests(documents, tokenizer, pmi=False)
    metrics = made.metrics(documents, requests, [Loglikelihood(-1.0, False, 1), Loglikelihood(-2.0, False, 1)] * 6)
    assert metrics.values.keys() == {"acc"} and metrics.values["acc"].value == 0.5


def test_templates_cannot_reach_the_machine(tmp_path):
    made = task(tmp_path, doc_to_text="{{ question.__class__.__mro__ }}")
    with pytest.raises(EvalError, match="unsafe"):
        made.documents()


def test_the_values_of_a_task_s_own_code(tmp_path, tokenizer):
    """process_results may name any metric; a value that its aggregation cannot take is an error with its place."""
    code = "def scored(record, results):\n    return {'own': record['label'] * 0.5, 'other': VALUE}\n"
    for value, expected in (("1", None), ("'x'", "could not convert string to float: 'x'")):
        folder = tmp_path / value.strip("'")
        write(folder / "some/data/small/test.jsonl")
        (folder / "utils.py").write_text(code.replace("VALUE", value), encoding="utf-8")
        function = Function("utils.scored", folder / "utils.py")
        settings = TEXT | {"process_results": function, "metric_list": [{"metric": "own", "aggregation": "mean"}]}
        made = make_task(settings, folder / "it.yaml", data_dir=folder, allow_code=[folder])
        documents = made.documents()
        requests, answers = made.requests(documents, tokenizer, 0), [GeneratedText("x")] * 6
        if expected is None:
            metrics = made.metrics(documents, requests, answers)
            assert metrics.headline == "own" and metrics.score.value == 0.25 and metrics.values["other"].value == 1.0
        else:
            with pytest.raises(EvalError, match=re.escape(f"task it: some/data (small) [test]:1: {expected}")):
                made.metrics(documents, requests, answers)


def test_metrics_that_one_function_returns_have_its_aggregation(tmp_path, tokenizer):
    """As in the harness: those of pass@k, say, are aggregated as `metric_list` says of the function."""
    code = "def both(references, predictions):\n    return {'a@1': float(references[0]), 'a@2': 2.0}\n"
    write(tmp_path / "some/data/small/test.jsonl")
    (tmp_path / "utils.py").write_text(code + "def largest(items):\n    return max(items)\n", encoding="utf-8")
    both, largest = (Function(f"utils.{name}", tmp_path / "utils.py") for name in ("both", "largest"))
    settings = TEXT | {"metric_list": [{"metric": both, "aggregation": largest, "higher_is_better": False}]}
    made = make_task(settings, tmp_path / "it.yaml", data_dir=tmp_path, allow_code=[tmp_path])
    documents = made.documents()
    metrics = made.metrics(documents, made.requests(documents, tokenizer, 0), [GeneratedText("x")] * 6)
    assert {name: one.value for name, one in metrics.values.items()} == {"a@1": 1.0, "a@2": 2.0}
    assert metrics.lower_is_better == ["a@1", "a@2"]


@pytest.mark.parametrize(
    ("changes", "example"),
    [
        ({"fewshot_config": {"doc_to_choice": ["", "yes"]}}, "Q: is 0 odd?\nA: \n\nQ: is"),
        ({**TEXT, "doc_to_target": "{{['']}}"}, "Q: is 0 odd?\nA: \n\nQ: is"),
        ({**TEXT, "doc_to_target": "{{''}}"}, "Q: is 0 odd?\nA:Q: is"),
    ],
)
def test_examples_with_an_empty_answer_are_the_harness_s(tmp_path, tokenizer, changes, example):
    config = {"sampler": "first_n", "samples": ROWS[:1], **changes.get("fewshot_config", {})}
    made = task(tmp_path, **changes | {"fewshot_config": config})
    documents = made.documents()
    contexts = [tokenizer.decode(one.context) for one in made.requests(documents, tokenizer, 1)]
    assert all(context.startswith(example) for context in contexts)


def test_the_settings_that_results_keep(tmp_path):
    """All that changes a prompt or a score, in JSON; neither data nor folders, which two machines may have elsewhere."""
    examples = {"sampler": "first_n", "samples": [{"question": "x", "label": datetime.date(2026, 1, 2)}]}
    (tmp_path / "utils.py").write_text("", encoding="utf-8")
    code = Function("utils.made", tmp_path / "utils.py")
    changes = {"target_delimiter": "", "fewshot_config": examples, "process_docs": code}
    made = make_task(CHOICES | changes, tmp_path / "it.yaml", allow_code=[tmp_path]).described()
    assert json.loads(json.dumps(made)) == made and str(tmp_path) not in json.dumps(made)
    assert (made["target_delimiter"], made["process_docs"]) == ("", "!function utils.made")
    assert made["examples"]["samples"] == [{"question": "x", "label": "2026-01-02"}]
    assert not made.keys() & {"dataset_path", "num_fewshot", "file"}
