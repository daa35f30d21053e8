"""What is kept of a document: digests that tell documents apart, excerpts, and files that read back as they were."""

import gzip
import json
import math

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.document_scores import (
    ANSWERS_PER_TASK,
    answer_rows,
    contribution,
    describe,
    encode_lines,
    given_answer,
    read_lines,
)
from llmtrain.eval.report.metrics import DocumentMetrics
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.tasks.documents import Choices, Document, Question
from llmtrain.eval.tasks.sections import LmEvalPrompting
from tests.support.results import choices, questions, result, texts


def test_a_digest_is_of_the_texts_and_nothing_else():
    same = describe({"prompt": "q", "right": "a"})
    assert same["digest"] == describe({"right": "a", "prompt": "q"})["digest"]
    others = [
        describe({"prompt": "q", "right": "b"}),
        describe({"prompt": "qa", "right": ""}),
        describe({"prompt": "q", "right": "a"}, instruction="Answer:"),
        describe({"prompt": "q", "right": "a", "choices": ["a", "b"]}),
        describe({"prompt": "q", "right": "a", "choices": ["a, b"]}),
    ]
    assert len({one["digest"] for one in (same, *others)}) == 6
    long = [describe({"prompt": letter + 1000 * "x"}) for letter in "ab"]
    assert long[0]["digest"] != long[1]["digest"] and long[0]["prompt"] == long[1]["prompt"] == "…" + 200 * "x"


def test_documents_of_a_task_are_distinguished_by_gold_and_choices():
    def digest(content: Choices) -> str:
        answers = [one for _, [one, _] in choices([True] * len(content.choices))]
        return process_results(Document(0, "x:1", content), answers, LmEvalPrompting()).details["digest"]

    assert len({digest(Choices("q", ("a", "b"), gold)) for gold in (0, 1)} | {digest(Choices("q", ("a", "c"), 0))}) == 3


def test_reasoning_of_an_example_does_not_change_the_document():
    plain, reasoned = (Document(0, "x", Question("1 + 1", "2", (), thought)) for thought in (None, "one and one"))
    [(_, answer)] = questions(["2"])
    digests = {process_results(one, answer, LmEvalPrompting()).details["digest"] for one in (plain, reasoned)}
    assert len(digests) == 1


def test_lines_read_back(tmp_path):
    odd = "a\u2028b\ud800\nc"  # a line separator and half of a surrogate pair
    details = {"document": 3, "prompt": odd, "log_likelihoods": [-1.25, -math.inf]}
    made = DocumentMetrics(3, None, {"acc": (1.0, 1.0), "word_perplexity": (-7.5, 3.0)}, details, 0)
    file = tmp_path / "x.jsonl.gz"
    file.write_bytes(encode_lines([made, made]))
    first, second = read_lines(file)
    assert first == second == {**details, "values": {"acc": 1.0, "word_perplexity": [-7.5, 3.0]}}
    assert contribution(first, "acc") == (1.0, 1.0) and contribution(first, "word_perplexity") == (-7.5, 3.0)
    assert json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])["document"] == 3, (
        "as any other program reads it"
    )
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(EvalError, match=r"x\.jsonl\.gz cannot be read"):
        read_lines(file)


def test_rows_of_answers_are_bounded_and_for_people():
    kinds = {
        "acc_sum": choices([True, False]),
        "exact_match": questions(["1", "x" * 900]),
        "word_perplexity": texts([5.0]),
    }
    rows = {
        metric: list(answer_rows("t", 0, metric, result("m", "t", answered).metrics.per_document))
        for metric, answered in kinds.items()
    }
    assert rows["acc_sum"][1] == ["t", 0, "t.jsonl:2", "question 1?", "right | one", "wrong one", "acc_sum", 0.0]
    assert rows["exact_match"][0][3:6] == ["0 + 1 =\n", "1", "1"] and len(rows["exact_match"][1][5]) == 501
    assert rows["word_perplexity"][0][5:] == ["log-likelihood -5.00", "word_perplexity", -1.25]
    many = result("m", "t", choices([True] * 300)).metrics.per_document
    assert len(list(answer_rows("t", 0, "acc_sum", many))) == ANSWERS_PER_TASK
    assert given_answer({}, "acc_sum") == ""
    chosen = {"choices": ["no", "yes", "so"], "log_likelihoods": [-3.0, -1.0, -2.0, -0.1], "chosen": {"acc": 2}}
    assert [given_answer(chosen, name) for name in ("acc", "acc,strict", "f1", "brier_score")] == [
        "so",
        "so",
        "yes",
        "yes",
    ]
    assert given_answer({"choices": ["no", "yes"]}, "f1") == ""
