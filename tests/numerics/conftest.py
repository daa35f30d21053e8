"""The suites interpreted_*.py run in processes of their own, in which Triton interprets."""

import os

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from tests.support.icl import TOKENIZERS, byte_level
from tests.support.interpreter import speed_up

if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up()


@pytest.fixture(scope="session", params=TOKENIZERS)
def any_tokenizer(request) -> TextTokenizer:
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return byte_level()
