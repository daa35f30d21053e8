"""Documents that cannot be used: told together, with a bound, or left out and counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import BadDocuments, EvalError
from llmtrain.eval.prepare import Prepared, check_prompts, prepare_steps, read_documents
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.run_config import EvalRun, TaskRun
from llmtrain.eval.scoring.overlap import run_steps
from tests.support.icl import byte_level

GOOD = {"query": "Is it", "choices": ["so", "not so"], "gold": 1}
SILENT = "\u200b"
"""Text for which this tokenizer has no token."""
WINDOW = 40
RUN = EvalRun.model_validate({"tasks": ["mine"]})
SKIPPING = RUN.model_copy(update={"skip_bad_documents": True})


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    made = byte_level()
    made.backend.normalizer = normalizers.Replace(SILENT, "")
    return made


@pytest.fixture
def make(make):
    """make(records, shots, convention, **settings): a run of a task; records may be lines of text."""

    def made(records: list[Any], shots: int = 0, convention: str = "lm-eval", **settings: Any) -> TaskRun:
        return TaskRun(make(records, convention, **settings), shots)

    return made


def prepared(task: TaskRun, tokenizer: TextTokenizer, run: EvalRun) -> Prepared:
    documents = read_documents(task.task, run)
    check_prompts(task, documents, tokenizer, WINDOW, run)
    return run_steps(prepare_steps(task, documents, tokenizer, WINDOW, run))


def left_out(found: Prepared) -> dict[str, str]:
    return {Path(where).name: reason for where, reason in found.documents.skipped.items()}


def test_bad_records_are_reported_together_with_the_task(make):
    task = make([GOOD, GOOD | {"gold": 2}, '{"query": "q', GOOD | {"choices": ["a", " "]}])
    with pytest.raises(BadDocuments) as raised:
        read_documents(task.task, RUN)
    head, *lines = str(raised.value).splitlines()
    assert head.startswith("task mine: 3 documents cannot be used (skip_bad_documents: true leaves out")
    assert [line.partition("x.jsonl:")[2] for line in lines] == [
        "2: `gold` is 2, but there are 2 alternatives, counted from 0",
        "3: not JSON: Unterminated string starting at column 11",
        "4: `choices` 1 (from 0) is empty; there is nothing to score",
    ]


def test_a_message_names_some_and_counts_the_rest(make):
    with pytest.raises(EvalError) as raised:
        read_documents(make([GOOD | {"gold": 2}] * 1300).task, RUN)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("task mine: 1,300 documents cannot be used") and lines[-1] == "  and 1,295 more"
    assert len(lines) == 7


def test_skipping_leaves_out_bad_records_and_no_others(make, tokenizer):
    good = [GOOD | {"query": f"Is it {number}"} for number in range(6)]
    records: list[Any] = [*good[:2], "[]", *good[2:5], GOOD | {"gold": "none"}, good[5]]
    found = prepared(make(records, shots=2), tokenizer, SKIPPING)
    assert list(left_out(found)) == ["x.jsonl:3", "x.jsonl:7"]
    whole = prepared(make(good, shots=2), tokenizer, RUN)
    assert [one.content for one in found.documents.evaluated] == [one.content for one in whole.documents.evaluated]
    assert found.requests == whole.requests


def test_a_choice_without_a_token_of_its_own(make, tokenizer):
    records = [GOOD, GOOD | {"choices": ["so", SILENT]}, GOOD | {"query": "Was it"}]
    for shots in (0, 1):
        task = make(records, shots, lm_eval={"continuation_delimiter": ""})
        documents = read_documents(task.task, RUN)
        with pytest.raises(BadDocuments, match=r"task mine: \S*x\.jsonl:2: '\\u200b' has no token of its own"):
            check_prompts(task, documents, tokenizer, WINDOW, RUN)
        found = prepared(task, tokenizer, SKIPPING)
        assert list(left_out(found)) == ["x.jsonl:2"]
        assert [one.document for one in found.requests] == [0, 0, 2, 2]
        assert [one.index for one in found.documents.evaluated] == [0, 2]


@pytest.mark.parametrize("convention", ["foundry", "lm-eval"])
def test_a_continuation_too_long_for_the_model(make, tokenizer, convention):
    task = make([GOOD | {"choices": ["so", "so " * 60]}, GOOD], convention=convention)
    documents = read_documents(task.task, RUN)
    with pytest.raises(BadDocuments, match=r"x\.jsonl:1: the model reads 40 tokens, and a continuation of \d+ tokens"):
        check_prompts(task, documents, tokenizer, WINDOW, RUN)
    found = prepared(task, tokenizer, SKIPPING)
    assert list(left_out(found)) == ["x.jsonl:1"] and {one.document for one in found.requests} == {1}


def test_what_is_no_fault_of_a_document_is_not_left_out(make, tokenizer):
    task = make([GOOD, GOOD | {"query": "Was it"}], shots=2)
    with pytest.raises(EvalError, match="2 few-shot examples asked for, but there are only 1"):
        prepared(task, tokenizer, SKIPPING)
    task = make([{"context": "Is it", "answer": "so"}], type="generation")
    with pytest.raises(EvalError, match="task mine: the model reads 40 tokens, and an answer of up to 256 tokens"):
        prepared(task, tokenizer, SKIPPING)
    with pytest.raises(EvalError, match=r"x\.jsonl:1: `gold` is 2.*\n  no document is left"):
        prepared(make([GOOD | {"gold": 2}]), tokenizer, SKIPPING)


def test_the_check_of_prompts_reads_their_ends_and_finds_the_same(make, tokenizer):
    """Long contexts, which the check cuts short, make no difference for what it finds."""
    long = "question " * 300
    records = [GOOD | {"query": f"{long}{end}", "choices": ["so", SILENT + "so", "it"]} for end in ("Is it", "Is ", "")]
    for convention, shots in (("foundry", 0), ("foundry", 1), ("lm-eval", 0), ("lm-eval", 1)):
        task = make(records, shots, convention)
        documents = read_documents(task.task, RUN)
        check_prompts(task, documents, tokenizer, WINDOW, RUN)
        whole = task.task.requests(documents, tokenizer, shots)
        assert all(isinstance(one, LoglikelihoodRequest) and one.continuation for one in whole)


def test_reasoning_that_only_some_records_have(make):
    records = [{"context": "a", "answer": "b", "chain_of_thought": "c"}, {"context": "a", "answer": "b"}]
    with pytest.raises(EvalError, match=r"x\.jsonl:2: `chain_of_thought` is missing, which other records have"):
        read_documents(make(records, convention="foundry", type="generation").task, RUN)
    assert len(read_documents(make(records, type="generation").task, RUN)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"query": "a\tb"}', "not JSON: Invalid control character at column 13"),
        ('{"query": "a"', "not JSON: Expecting ',' delimiter at column 14"),
        ('{"query": ' + "[" * 100_000, "not JSON that is read here: nested too deeply"),
        ('{"gold": ' + "1" * 5000 + "}", "not JSON that is read here: Exceeds the limit"),
        ('{"query": "a", "query": "b"}', "field `query` is there twice"),
        (
            '{"query": NaN, "choices": ["a", "b"], "gold": 0}',
            "expected text from the template '{{query}}', found float nan",
        ),
        ("null", "expected an object, found NoneType"),
    ],
)
def test_lines_that_are_no_records(make, line, reason):
    with pytest.raises(BadDocuments) as raised:
        read_documents(make([GOOD, line]).task, RUN)
    assert f"x.jsonl:2: {reason}" in str(raised.value) or f"x.jsonl:2: `query`: {reason}" in str(raised.value)


def test_a_byte_order_mark_and_whole_numbers_with_a_point_are_read(make, tmp_path):
    task = make([GOOD | {"gold": 1.0}]).task
    (tmp_path / "x.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "x.jsonl").read_bytes())
    assert read_documents(task, RUN).evaluated[0].content.gold == 1


@pytest.mark.parametrize("text", [json.dumps([GOOD]), json.dumps([GOOD], indent=1), json.dumps(GOOD, indent=1)])
def test_json_that_is_no_jsonl_is_reported_once(make, tmp_path, text):
    task = make([GOOD]).task
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(EvalError, match=r"task mine: \S*x\.jsonl: JSON, but not JSONL; write one object a line"):
        read_documents(task, RUN)


def test_a_folder_is_no_jsonl_file(make, tmp_path):
    task = make([GOOD], source={"path": "folder"}).task
    (tmp_path / "folder").mkdir()
    with pytest.raises(EvalError, match=r"task mine: \S*folder is a folder; name a JSONL file in it"):
        read_documents(task, RUN)
