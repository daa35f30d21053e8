"""Instructions that a program can check, and records that hold none. Beside the harness: numerics/test_eval_ifeval.py."""

import importlib.util

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.instructions import check_libraries, read_instruction
from llmtrain.eval.prompts.requests import GeneratedText
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.tasks.documents import Document, Instructed
from llmtrain.eval.tasks.sections import LmEvalPrompting


def test_a_character_that_is_no_letter_is_counted_and_an_empty_text_follows_nothing():
    """All other checks are compared with the harness's; this one draws a letter there."""
    arguments = {"letter": "#", "let_frequency": 2, "let_relation": "at least", "of_another": None}
    instruction = read_instruction("keywords:letter_frequency", arguments)
    assert [instruction.is_followed(text) for text in ("#a #b", "#a", " \n")] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("punctuation:no_coma", {}, "unknown instruction 'punctuation:no_coma'; did you mean punctuation:no_comma"),
        (None, {}, "unknown instruction None"),
        ("punctuation:no_comma", None, "arguments of punctuation:no_comma are None; expected a mapping"),
        ("punctuation:no_comma", {"n": 1}, "punctuation:no_comma has no argument n; it has none"),
        (
            "startend:end_checker",
            {"end_phrase": None},
            "startend:end_checker needs the argument end_phrase; it has none",
        ),
        ("startend:end_checker", {"end_phrase": 3}, "end_phrase is 3; expected a text"),
        ("keywords:existence", {"keywords": []}, r"keywords is \[\]; expected a list of texts"),
        ("keywords:existence", {"keywords": ["("]}, r"keywords '\(' is not a regular expression"),
        (
            "length_constraints:number_words",
            {"num_words": 0, "relation": "at least"},
            "num_words is 0; expected an integer above 0",
        ),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "at most"},
            "expected one of less than, at least",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "expected one character",
        ),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "a"},
            "nth_paragraph is 3 of 2 paragraphs",
        ),
    ],
)
def test_what_cannot_be_checked(name, arguments, message):
    with pytest.raises(EvalError, match=message):
        read_instruction(name, arguments)


def test_libraries_are_asked_for_by_what_needs_them(monkeypatch):
    quiet = read_instruction("punctuation:no_comma", {})
    language = read_instruction("change_case:english_capital", {})
    sentences = read_instruction("length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_libraries([quiet])
    with pytest.raises(
        EvalError, match="english_capital is checked with langdetect, which is not installed: pip install"
    ):
        check_libraries([quiet, language])
    with pytest.raises(
        EvalError, match="number_sentences is checked with nltk, which is not installed: pip install nltk"
    ):
        check_libraries([sentences])


def test_an_absent_sentence_model_is_asked_for(monkeypatch):
    data = pytest.importorskip("nltk.data")
    monkeypatch.setattr(data, "path", [])
    with pytest.raises(EvalError, match=r"nltk's data punkt_tab: python -m nltk.downloader punkt_tab"):
        check_libraries(
            [read_instruction("length_constraints:number_sentences", {"num_sentences": 1, "relation": "at least"})]
        )


def test_prompts_and_instructions_are_counted_strictly_and_loosely():
    names = [("punctuation:no_comma", {}), ("detectable_format:json_format", {}), ("startend:quotation", {})]
    content = Instructed("Do it.", tuple(read_instruction(*one) for one in names))
    made = process_results(Document(0, "x:1", content), [GeneratedText("Sure, here:\n[]")], LmEvalPrompting())
    assert made.values == {
        "prompt_level_strict_acc": (0.0, 1.0),
        "inst_level_strict_acc": (0.0, 3.0),
        "prompt_level_loose_acc": (0.0, 1.0),
        "inst_level_loose_acc": (2.0, 3.0),
    }
    assert made.details["loose"] == [True, True, False]
