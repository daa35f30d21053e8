"""Storing responses, and reading them again for the same requests only."""

import json
import math

import pytest

from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest, Loglikelihood, LoglikelihoodRequest
from llmtrain.eval.report.response_store import ResponseStore, requests_digest
from llmtrain.logs import log

ABOUT = {"model": "a", "requests": "b"}
ANSWERS = {
    3: [Loglikelihood(-1.2345678901234567, True, 2, 1), Loglikelihood(-math.inf, False, 7)],
    5: [Loglikelihood(-0.1, False, 1)],
}


def test_answers_come_back_as_they_were(tmp_path):
    ResponseStore(tmp_path, ABOUT).append(ANSWERS)
    ResponseStore(tmp_path, ABOUT).append({9: [GeneratedText("a\nb \N{SNOWMAN}", 4)]})
    assert ResponseStore(tmp_path, ABOUT).read() == {**ANSWERS, 9: [GeneratedText("a\nb \N{SNOWMAN}", 4)]}


def test_nothing_is_there_at_first_nor_for_another_question(tmp_path):
    ResponseStore(tmp_path, ABOUT).append(ANSWERS)
    assert ResponseStore(tmp_path, {**ABOUT, "model": "c"}).read() == {}
    assert ResponseStore(tmp_path / "none", ABOUT).read() == {}


@pytest.mark.parametrize("cut", range(1, 50, 7))
def test_a_line_cut_short_loses_only_itself(tmp_path, cut):
    store = ResponseStore(tmp_path, ABOUT)
    store.append({3: ANSWERS[3]})
    store.append({5: ANSWERS[5]})
    content = store.path.read_bytes()
    store.path.write_bytes(content[:-cut])
    assert store.read() in ({3: ANSWERS[3]}, ANSWERS)
    store.append({7: ANSWERS[5]})
    found = store.read()
    assert found[3] == ANSWERS[3] and found[7] == ANSWERS[5]


def test_a_file_cut_within_its_first_line_is_begun_anew(tmp_path):
    store = ResponseStore(tmp_path, ABOUT)
    store.append(ANSWERS)
    store.path.write_bytes(store.path.read_bytes()[:20])
    assert store.read() == {}
    store.append({5: ANSWERS[5]})
    assert store.read() == {5: ANSWERS[5]}


def test_a_file_of_another_question_under_this_name_is_not_believed(tmp_path):
    store, other = ResponseStore(tmp_path, ABOUT), ResponseStore(tmp_path, {"model": "other"})
    other.append(ANSWERS)
    other.path.rename(store.path)
    assert store.read() == {}


@pytest.mark.parametrize(
    "other",
    [
        [LoglikelihoodRequest(0, 0, (1, 2), (3,))],
        [LoglikelihoodRequest(1, 0, (1,), (2, 3))],
        [LoglikelihoodRequest(0, 0, (1,), (2, 4))],
        [LoglikelihoodRequest(0, 0, (1,), (2, 3)), LoglikelihoodRequest(0, 1, (1,), (2, 3))],
        [GenerateUntilRequest(0, (1, 2, 3), (), 1)],
        [],
    ],
)
def test_other_requests_have_another_digest(other):
    assert requests_digest(other) != requests_digest([LoglikelihoodRequest(0, 0, (1,), (2, 3))])


def test_how_far_to_generate_is_part_of_the_question():
    texts = {
        requests_digest([GenerateUntilRequest(0, (1,), stops, n)]) for stops in ((), ("a",), ("b",)) for n in (1, 2)
    }
    assert len(texts) == 6


def test_a_damaged_line_is_named_and_its_document_asked_again(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    store = ResponseStore(tmp_path, ABOUT)
    store.append(ANSWERS)
    content = store.path.read_bytes()
    for at in range(len(content) - 1):
        for bit in (1, 8):
            store.path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            found = store.read()
            assert all(found[document] == ANSWERS[document] for document in found), content[at - 5 : at + 5]
    store.path.write_bytes(content.replace(b"-0.1", b"-0.2"))
    caplog.clear()
    assert store.read() == {3: ANSWERS[3]}
    assert f"{store.path}: line 3 is not what was written" in caplog.text
    store.append({5: ANSWERS[5]})
    assert store.read() == ANSWERS


def test_reads_lines_from_before_there_were_checksums_and_names_those_that_hold_no_responses(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(log, "propagate", True)
    store = ResponseStore(tmp_path, ABOUT)
    lines = [store.about, {"document": 5, "answers": [[-0.1, False, 1, 0]]}]
    bad = [
        {"document": 6},
        {"document": 7, "answers": [[]]},
        {"document": [], "answers": []},
        {"document": 8, "answers": [[{}, 1, 1]]},
    ]
    store.path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *bad, [], 3]))
    assert store.read() == {5: ANSWERS[5]}
    assert "line 3, 4, 5, 6, 7, 8 holds no responses" in caplog.text
    store.append({3: ANSWERS[3]})
    assert store.read() == ANSWERS
