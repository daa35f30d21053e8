"""Text comes out whole: characters, stop strings, word starts."""

import random
from dataclasses import replace

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.generate import text
from llmtrain.generate.text_stream import TextStream, _overlap
from tests.support.icl import byte_level, sentence_piece


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


@pytest.mark.parametrize(
    ("bos", "begins", "first"), [(True, None, "bos"), (True, (), None), (False, None, None), (False, (7,), 7)]
)
def test_a_prompt_begins_as_texts_did_in_training(bos, begins, first):
    """By the post-processor of tokenizer.json (Llama 3's kind), or as a run's data was made."""
    tokenizer = replace(byte_level(bos), begins=begins)
    before = [tokenizer.bos_id if first == "bos" else first] if first is not None else []
    assert tokenizer.prompt_ids("Is it") == [*before, *tokenizer.encode("Is it")]
    assert tokenizer.prompt_ids("") == (before or [tokenizer.eod_id])


@pytest.mark.parametrize("named", [7, [7, 8], [8, 7], None, "7"])
def test_every_token_that_ends_texts_ends_an_answer(tokenizer, monkeypatch, named):
    tokenizer = replace(tokenizer, generation_config={"eos_token_id": named})
    seen: list[list[int]] = []

    def decode(model, ids, options, *, max_new_tokens, stop, row_numbers):
        seen.extend(ids)
        yield [stop(0, token) for token in [*tokenizer.encode("the"), 7]]

    monkeypatch.setattr(text, "decode", decode)
    chunks = list(text.complete(None, tokenizer, ["go"], max_new_tokens=9))  # type: ignore[arg-type]
    assert seen == [tokenizer.prompt_ids("go")]
    assert [chunk.end for chunk in chunks if chunk.end] == ["length" if named in (None, "7") else "eod"]


BYTES = ["<0x41>", "<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xE8>", "<0xB5>", "<0xB0>", "<0xFF>"]


def test_bytes_are_shown_once_their_run_has_ended():
    """Llama 2's kind decodes a run of bytes as one: what comes in pieces is the text that tokenizers makes of all tokens."""
    tokenizer = sentence_piece()
    backend, rng = tokenizer.backend, random.Random(0)
    ids = {name: backend.token_to_id(name) for name in BYTES}
    assert tokenizer.byte_ids >= set(ids.values()) and not byte_level().byte_ids
    context = tokenizer.encode("the answer is")
    runs = [["<0x0A>", "<0xF0>"], ["<0x41>", "<0xFF>"], BYTES[2:6], BYTES[6:9], BYTES[6:8]]
    runs += [rng.sample(BYTES, rng.randint(1, 6)) for _ in range(40)]
    words = tokenizer.encode("so long and how")
    for run in runs:
        tokens = [word for name in run for word in [ids[name], *rng.sample(words, rng.choice([0, 0, 1]))]]
        made = TextStream(tokenizer, context)
        found = "".join(map(made.add, tokens)) + made.finish()
        assert found == tokenizer.decode([*context, *tokens])[len(tokenizer.decode(context)) :], run
