"""End of generated answers."""

import json

import pytest

from llmtrain.data.tokenize.tokenizer import end_ids, read_generation_config
from llmtrain.eval.scoring.generation import Answer
from tests.support.icl import byte_level


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [0, 7]}, "config.json": {"eos_token_id": 3}}, [0, 7]),
        ({"generation_config.json": {"eos_token_id": 5}}, [5]),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 3}}, []),
        ({"config.json": {"eos_token_id": 3}}, [3]),
        ({}, []),
    ],
)
def test_the_tokens_that_end_a_text_are_those_of_transformers(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_ids(read_generation_config(tmp_path)) == expected


def test_what_ends_an_answer_is_no_part_of_it():
    tokenizer = byte_level()
    asked, said = tokenizer.encode("Is it"), tokenizer.encode(" so it is")
    for end in (tokenizer.eod_id, said[-1]):
        answer = Answer(tokenizer, asked, [], end_ids=[said[-1]])
        assert [answer.add(token) for token in (*said[:-1], end, said[0])] == [False] * (len(said) - 1) + [True, True]
        assert answer.finish() == tokenizer.decode(said[:-1])


@pytest.mark.parametrize(
    ("stops", "expected"), [([], " so it is so"), (["<s>"], " so it is"), (["x<s>"], " so it is<s> so")]
)
def test_special_tokens_are_no_part_of_an_answer_but_may_stop_it(stops, expected):
    tokenizer = byte_level(bos=True)
    said, bos = tokenizer.encode(" so it is"), tokenizer.backend.token_to_id("<s>")
    answer = Answer(tokenizer, tokenizer.encode("Is it"), stops)
    assert bos is not None
    for token in (*said, bos, *tokenizer.encode(" so")):
        answer.add(token)
    assert answer.finish() == expected
