"""Filters of generated answers, one by one and in chains."""

import pytest

from llmtrain.eval.report.filters import apply_filters
from llmtrain.eval.tasks.filters import Convert, Extract, ExtractChoice, ExtractNumber, Map, SortedWords

NUMBER = ExtractNumber(type="number", match=-1)
CHOICE = ExtractChoice(type="multi_choice_regex", ignore_case=True, ignore_punctuation=True)
CHOICES = (" The Mark", "the mark, and more", "Ann!")


@pytest.mark.parametrize(
    ("text", "chain", "answer"),
    [
        ("so (B)", [CHOICE], "(B)"),
        ("THE MARK & MORE", [CHOICE], "(A)"),
        ("the mark and more", [CHOICE], "(B)"),
        ("It is ann.", [CHOICE], "(C)"),
        ("Answer: C", [CHOICE], "(C)"),
        ("C", [CHOICE], "[invalid]"),
        ("It was Ann.", [CHOICE.model_copy(update={"ignore_punctuation": False})], "[invalid]"),
        ("There are twenty one.", [NUMBER], "21"),
        ("one hundred and five", [NUMBER], "105"),
        ("two thousand", [NUMBER], "2000"),
        ("5 or nine", [NUMBER], "5"),
        ("three, four", [NUMBER], "4"),
        ("thousand two", [NUMBER], "[invalid]"),
        ("no", [NUMBER], "[invalid]"),
        (" A ", [Convert(type="remove_whitespace")], "A"),
        (" A ", [Convert(type="lowercase")], " a "),
        (" a ", [Convert(type="uppercase")], " A "),
        ("b", [Map(type="map", values={"a": "1"})], "[invalid]"),
        ("So: YES", [Convert(type="lowercase"), Extract(pattern="yes|no"), Map(type="map", values={"yes": "1"})], "1"),
        ("as it is ", [], "as it is "),
    ],
)
def test_answers(text, chain, answer):
    assert apply_filters(text, chain, CHOICES) == answer


def test_words_come_in_the_order_in_which_they_occur_last():
    words = ("pear", "bee", "c++")
    assert apply_filters("bee pear bees bee", [SortedWords(type="word_order")], words) == "pear bee"
    assert apply_filters("none", [SortedWords(type="word_order")], words) == ""


def test_a_step_is_for_its_categories():
    chain = [Extract(pattern="[a-z]+", categories=["words"]), Extract(pattern=r"\d+", categories=["numbers"])]
    assert apply_filters("7 bees", chain, category="words") == "bees"
    assert apply_filters("7 bees", chain, category="numbers") == "7"
    assert apply_filters("7 bees", chain, category="others") == "7 bees"
