"""Tokens and trained parts of conversations by the chat templates of published models that TRL ships, beside transformers'."""

from functools import cache
from pathlib import Path

import pytest
import trl
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from llmtrain.data.chat.conversation import Conversation
from llmtrain.data.chat.samples import ChatSettings, Sample
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.data.tokenize.tokenizer import train_bpe
from tests.support.chats import encoded, marked_by_transformers

pytestmark = pytest.mark.ci
FOLDER = Path(trl.__file__).parent / "chat_templates"
# llava_next has no template for contents that are text.
MARKED = sorted({path.stem for path in FOLDER.glob("*_training.jinja")} - {"llava_next_training"})
TEXT = (
    "what is the colour of tea? it is green, and the sky is blue. 1 + 1 = 2; user assistant system <|im_start|> think"
)
TURNS = [
    {"role": "user", "content": "What is the colour of tea?"},
    {"role": "assistant", "content": "It is green"},
    {"role": "user", "content": " And the sky?\n"},
    {"role": "assistant", "content": "The sky is blue."},
]


@cache
def oracle() -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(train_bpe([TEXT * 3], 340, or_fewer=True).backend.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def encode(text: str, chat: Conversation, targets: str) -> Sample:
    tokenizer = oracle()
    special = {name: str(getattr(tokenizer, name)) for name in ("eos_token", "bos_token")}
    settings = ChatSettings("messages", (), ChatTemplate(text, special, "of TRL"), targets, "none")
    return encoded(tokenizer, settings, chat)


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("turns", [2, 4])
def test_marked_answers_are_those_of_transformers(name, turns):
    text, chat = (FOLDER / f"{name}.jinja").read_text(), Conversation(TURNS[:turns])
    found = encode(text, chat, "all")
    assert (found.ids.tolist(), found.trained.tolist()) == marked_by_transformers(oracle(), text, chat)
    assert found.trained.any()


@pytest.mark.parametrize("name", [name.removesuffix("_training") for name in MARKED])
def test_unmarked_templates_train_the_last_answer_behind_the_longest_common_prefix(name):
    text, chat = (FOLDER / f"{name}.jinja").read_text(), Conversation(TURNS)

    def ids(messages: list[dict[str, str]], asks: bool) -> list[int]:
        return oracle().apply_chat_template(messages, chat_template=text, add_generation_prompt=asks, return_dict=False)  # type: ignore[return-value]

    whole, before = ids(TURNS, False), ids(TURNS[:-1], True)
    begin = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    found = encode(text, chat, "last")
    assert found.ids.tolist() == whole
    assert found.trained.tolist() == [at >= begin for at in range(len(whole))] and begin < len(whole)
