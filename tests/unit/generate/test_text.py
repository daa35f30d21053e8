"""Text comes out whole: characters, stop strings, word starts."""

from __future__ import annotations

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.generate.text import TextStream, _overlap


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 280)


def stream(
    tokenizer: TextTokenizer, text: str, stops: tuple[str, ...] = (), prompt: str = "go"
) -> tuple[list[str], TextStream]:
    made = TextStream(tokenizer, tokenizer.encode(prompt), stops)
    pieces = []
    for token in tokenizer.encode(text):
        pieces.append(made.add(token))
        if made.stopped:
            break
    return [*pieces, made.finish()], made


@pytest.mark.parametrize("text", ["the quick fox", "naïve café", "日本語 🙂 end", " leading and trailing "])
def test_pieces_make_up_the_text(tokenizer, text):
    pieces, _ = stream(tokenizer, text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    half = tokenizer.encode("🙂")[:2]
    made = TextStream(tokenizer, tokenizer.encode("go"))
    assert [made.add(token) for token in half] == ["", ""]
    assert "\ufffd" in made.finish()


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("brown",), "the quick "),
        (("own f",), "the quick br"),  # across tokens
        (("fox", "quick"), "the "),  # the one that comes first
        (("brownie",), "the quick brown fox"),  # began, but did not come
        (("fox!",), "the quick brown fox"),  # held back until the end
        (("the",), ""),
    ],
)
def test_a_stop_string_ends_the_text_and_is_not_part_of_it(tokenizer, stops, expected):
    pieces, made = stream(tokenizer, "the quick brown fox", stops)
    assert "".join(pieces) == expected
    assert made.stopped == (expected != "the quick brown fox")


def test_what_may_become_a_stop_string_is_not_shown_yet(tokenizer):
    pieces, _ = stream(tokenizer, "the quick brown fox", ("quick brown dog",))
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert _overlap(shown, "quick brown dog") == 0
