"""`generation_kwargs` of lm-evaluation-harness: ends of an answer, and when its tokens are drawn."""

import re
from typing import Any

import pytest

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.generation import read_generation
from llmtrain.generate.options import Sampling


def read(**given: Any) -> Any:
    return read_generation(given, ["\n\n"], seed=7)


def test_ends():
    assert (read().stops, read().max_new_tokens) == (("\n\n",), 256)
    assert read(until="Q:").stops == ("Q:",)
    assert read(until=["Q:", ""]).stops == ("Q:",)  # an empty text would end every answer
    assert read(until=[]).stops == ()
    assert read(max_new_tokens=9, max_tokens=5).max_new_tokens == 9  # the harness's order of precedence
    assert read(max_completion_tokens="12").max_new_tokens == 12


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
        {"temperature": 0},
        {"temperature": 0.0, "top_p": 0.95},
        {"do_sample": None, "num_beams": 1, "use_cache": True, "early_stopping": False},
        {"do_sample": False, "repetition_penalty": 1},
    ],
)
def test_greedy(given):
    assert read(**given).sampling is None


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({"do_sample": True, "temperature": 1}, Sampling(1.0, seed=7)),
        ({"temperature": "0.5"}, Sampling(0.5, seed=7)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, Sampling(0.6, 20, 0.95, seed=7)),
        ({"temperature": 0.6, "top_k": 0}, Sampling(0.6, seed=7)),
        ({"temperature": 0.6, "top_k": -1, "repetition_penalty": 1.1}, Sampling(0.6, None, None, 1.1, 7)),
        ({"repetition_penalty": 1.1}, Sampling(0.0, None, None, 1.1, 7)),
    ],
)
def test_drawn(given, drawn):
    assert read(**given).sampling == drawn


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"do_sample": True}, "do_sample: answers cannot be drawn at temperature 0"),
        ({"do_sample": "sometimes"}, "do_sample: expected true or false, found 'sometimes'"),
        ({"temperature": -1}, "temperature = -1.0: must be at least 0"),
        ({"temperature": "warm"}, "temperature: expected a number, found 'warm'"),
        ({"temperature": 1, "top_p": 0}, "top_p = 0.0: must be above 0"),
        ({"num_beams": 4}, "num_beams: 4; beam search is not supported, only 1"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2; it is not supported, only 1"),
        ({"min_p": 0.1}, "min_p: not supported"),
        ({"tempratur": 0.1}, "tempratur: not supported; did you mean temperature?"),
        ({"max_gen_toks": 0}, "max_gen_toks: 0; expected at least 1"),
        ({"max_gen_toks": "many"}, "max_gen_toks: expected a number"),
        ({"until": 3}, "until: expected texts, found 3"),
        ({"until": [1]}, "until: expected texts"),
        ({"until": None}, "until: null; write [] for answers without stop texts"),
    ],
)
def test_refused_by_name(given, said):
    with pytest.raises(EvalError, match="^" + re.escape(said)):
        read(**given)
