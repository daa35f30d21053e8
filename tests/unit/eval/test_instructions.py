"""Instructions that a program can check, and records that hold none. Beside the harness: numerics/test_eval_ifeval.py."""

import importlib.util

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.instructions import check_libraries, read_instruction
from llmtrain.eval.prompts.requests import GeneratedText
from llmtrain.eval.report.process_results import process_results
from llmtrain.eval.tasks.documents import Document, Instructed
from llmtrain.eval.tasks.sections import LmEvalPrompting


@pytest.mark.parametrize(
    ("name", "arguments", "followed", "not_followed"),
    [
        ("keywords:existence", {"keywords": ["sea", "Sun"]}, "SEASIDE and sun", "sea"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a cat", "dog"),
        ("keywords:forbidden_words", {"forbidden_words": ["sea"]}, "seaside", "the Sea."),
        ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "#a #b", "#a"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb\n***\n", "a\n\nb"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "these are three"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
            "a\n\n'so, it",
            "so\n\na",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\np. p. s. y", "P.S. y"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
        ("detectable_format:constrained_response", {}, "My answer is maybe.", "maybe"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "a *b* c", "a ** c"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1 a Part 2 b",
            "Part 1",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<a>>", "<< >>"),
        ("combination:two_responses", {}, "a ****** b", "a ****** a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. So", "So: say it."),
        ("startend:end_checker", {"end_phrase": "The End"}, '"a the end"', "the end."),
        ("startend:quotation", {}, ' "a" ', '"'),
        ("punctuation:no_comma", {}, "a; b", "a, b"),
    ],
)
def test_checks(name, arguments, followed, not_followed):
    instruction = read_instruction(name, arguments | {"of_another": None})
    assert instruction.is_followed(followed)
    assert not instruction.is_followed(not_followed)
    assert not instruction.is_followed(" \n")


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
