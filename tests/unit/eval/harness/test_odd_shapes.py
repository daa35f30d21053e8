"""Task files whose faults would show once a model has answered: each is told before."""

import re
from typing import Any, ClassVar

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.harness_task import HarnessTask
from tests.support.icl import byte_level
from tests.unit.eval.harness.test_task import CHOICES, TEXT, filtered, matched, task, write


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (filtered({"function": "take_first_k", "k": 2}), "take first 2, but got 1 only"),
        (filtered({"function": "take_first_k", "k": 4}, repeats=3), "take first 4, but got 3 only"),
        (
            filtered({"function": "take_first_k", "k": 2}, {"function": "take_first_k", "k": 3}, repeats=4),
            "take first 3, but got 2 only",
        ),
        (filtered({"function": "map", "mapping_dict": {"a": 1}}, {"function": "lowercase"}), "no attribute 'lower'"),
    ],
)
def test_filters_that_fail_are_refused_before_a_model_is_asked(tmp_path, changes, expected):
    with pytest.raises(EvalError, match=rf"task it: filter_list: a filter failed: .*{expected}"):
        task(tmp_path, TEXT | changes).documents()


@pytest.mark.parametrize(
    "changes",
    [
        filtered(
            {"function": "take_first_k", "k": 3}, {"function": "majority_vote"}, {"function": "take_first"}, repeats=3
        ),
        filtered({"function": "map", "mapping_dict": {"yes": 1}}, {"function": "take_first"}),
        matched(regexes_to_ignore=["[.]", ","]),
        matched(regexes_to_ignore=None),
    ],
)
def test_what_is_no_fault(tmp_path, changes):
    assert len(task(tmp_path, TEXT | changes).documents()) == 6


WRONG: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "a number that is none": (CHOICES, [0, 1.5], "gives 1.5; expected the number or the text of a choice"),
    "nothing": (CHOICES, [0, None], "gives None; expected the number or the text of a choice"),
    "several among single ones": (
        CHOICES,
        [0, [0, 1]],
        "gives [0, 1], but that of the first document is of another kind",
    ),
    "a single one among several": (CHOICES, [[0], 1], "gives 1, but that of the first document is of another kind"),
    "texts among several numbers": (CHOICES, [[0], ["yes"]], "gives ['yes']; expected the numbers of choices"),
    "a text where a number chooses": (
        TEXT | {"doc_to_choice": ["no", "yes"], "doc_to_target": "label"},
        [0, "yes"],
        "gives 'yes'; with doc_to_choice, expected the number of a choice",
    ),
    "a number beyond the choices": (
        TEXT | {"doc_to_choice": ["no", "yes"], "doc_to_target": "label"},
        [0, 2],
        "gives 2, but there are 2 choices",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_right_answers_of_another_kind(tmp_path, monkeypatch, case):
    """They are bad documents, found while prompts are made. Rows are given as they are: `datasets` has one type per column."""

    class Rows(list):
        features: ClassVar = {"question": None, "label": None}

    settings, labels, expected = WRONG[case]
    made = task(tmp_path, settings)
    monkeypatch.setattr(HarnessTask, "eval_docs", Rows({"question": "q", "label": label} for label in labels))
    with pytest.raises(EvalError, match=re.escape(expected)) as error:
        made.requests(made.documents(), byte_level(), 0)
    assert "[test]:2" in str(error.value)


@pytest.mark.parametrize("choices", [{}, {"choices": []}, {"choices": [1, 2]}, {"choices": "AB"}])
def test_choices_that_a_filter_needs(tmp_path, choices):
    write(tmp_path / "some/data/small/test.jsonl", [{"question": "q", "label": 0} | choices])
    made = task(tmp_path, TEXT | filtered({"function": "multi_choice_regex"}, {"function": "take_first"}))
    with pytest.raises(
        EvalError, match="multi_choice_regex needs a column `choices` of texts; there are question, label"
    ):
        made.requests(made.documents(), byte_level(), 0)
