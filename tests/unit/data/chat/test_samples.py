"""Tokens and masks of conversations beside transformers', for the kinds of published chat templates."""

import json
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from llmtrain.data.chat.conversation import ChatFault, Conversation, conversation
from llmtrain.data.chat.samples import ChatSettings, Sample, SampleEncoder
from llmtrain.data.chat.template import CHATML, ChatError, ChatTemplate
from llmtrain.data.tokenize.encode import DocumentMarks
from llmtrain.data.tokenize.tokenizer import train_bpe
from tests.support.chats import encoded, marked_by_transformers

KINDS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[3] / "data" / "chat" / "templates.yaml").read_text()
)
WORDS = "what is the colour of tea? it is green, and the sky is blue. thank you! 1 + 1 = 2; größer als 世界 🍵 user assistant"
TURNS = [
    {"role": "user", "content": "What is the colour of tea? 世界"},
    {"role": "assistant", "content": "It is green 🍵"},
    {"role": "user", "content": " And the sky?\n"},
    {"role": "assistant", "content": "The sky is größer, and blue."},
]
CALLS = [
    {"role": "user", "content": "1 + 1?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}]


@cache
def oracle(kind: str) -> PreTrainedTokenizerFast:
    """transformers' tokenizer of a kind."""
    about = KINDS[kind]
    backend = Tokenizer.from_str(train_bpe([WORDS * 3], 340, or_fewer=True).backend.to_str())
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=about["special"][0], bos_token=about.get("bos"))
    found.add_special_tokens({"additional_special_tokens": about["special"]})
    return found


def template_of(kind: str, marked: bool) -> ChatTemplate:
    about = KINDS[kind]
    pair = ("{%- generation -%}", "{%- endgeneration -%}") if marked else ("", "")
    text = about["template"].replace("«", pair[0]).replace("»", pair[1])
    return ChatTemplate(text, {"eos_token": about["special"][0], "bos_token": about.get("bos", "")}, kind)


def marks_of(tokenizer: PreTrainedTokenizerFast, closes: bool = True) -> DocumentMarks:
    assert isinstance(tokenizer.eos_token_id, int)
    return DocumentMarks(tokenizer.eos_token_id, closes=closes)


def encode(kind: str, chat: Conversation, marked: bool, closes: bool = False, **settings: str) -> Sample:
    tokenizer = oracle(kind)
    given = {"targets": "all", "prompts": "none"} | settings
    found = ChatSettings("messages", (), template_of(kind, marked), given["targets"], given["prompts"])
    return encoded(tokenizer, found, chat, closes)


def conversations(kind: str) -> list[Conversation]:
    found = [Conversation(TURNS[:2]), Conversation(TURNS)]
    if not KINDS[kind].get("no_system"):
        found.append(Conversation([{"role": "system", "content": "Be brief."}, *TURNS]))
    return [*found, Conversation(CALLS, TOOLS)] if KINDS[kind].get("tools") else found


@pytest.mark.parametrize("kind", KINDS)
def test_marked_answers_are_those_of_transformers(kind):
    tokenizer, template = oracle(kind), template_of(kind, marked=True)
    for chat in conversations(kind):
        ids, mask = marked_by_transformers(tokenizer, template.text, chat)
        sample = encode(kind, chat, marked=True)
        assert sample.ids.tolist() == ids
        # transformers leaves out the last bytes of a character at the end of an answer
        if mask != sample.trained.tolist():
            text = tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, chat_template=template.text, tokenize=False
            )
            assert isinstance(text, str)
            added = [n for n, (a, b) in enumerate(zip(mask, sample.trained.tolist(), strict=True)) if a != b]
            offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            assert all(offsets[n] == offsets[n - 1] and text[slice(*offsets[n])] == "🍵" for n in added)
        assert sum(sample.trained) > 3


def prefix(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("kind", KINDS)
def test_without_marks_an_answer_begins_behind_the_longest_common_prefix(kind):
    tokenizer, template = oracle(kind), template_of(kind, marked=False)

    def ids(messages: list[dict[str, Any]], chat: Conversation, asks: bool) -> list[int]:
        found = tokenizer.apply_chat_template(
            messages, tools=chat.tools, chat_template=template.text, add_generation_prompt=asks, return_dict=False
        )
        return cast("list[int]", found)

    for chat in conversations(kind):
        whole = ids(chat.messages, chat, False)
        last = encode(kind, chat, marked=False, targets="last")
        assert last.ids.tolist() == whole
        begin = prefix(ids(chat.messages[:-1], chat, True), whole)
        assert last.trained.tolist() == [at >= begin for at in range(len(whole))] and begin < len(whole)
        if KINDS[kind].get("rewrites") and len(chat.answers) > 1:
            with pytest.raises(ChatFault, match=r"writes turn \d otherwise once further turns follow"):
                encode(kind, chat, marked=False)
            continue
        trained = [False] * len(whole)
        for number in chat.answers:
            begin = prefix(ids(chat.messages[:number], chat, True), whole)
            end = prefix(ids(chat.messages[: number + 1], chat, False), whole)
            trained[begin:end] = [True] * (end - begin)
        assert encode(kind, chat, marked=False).trained.tolist() == trained


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_no_token_ends_gets_the_end_of_document(kind):
    chat, eos = Conversation(TURNS), oracle(kind).eos_token_id
    plain, closed = encode(kind, chat, marked=True), encode(kind, chat, marked=True, closes=True)
    added = [eos] if KINDS[kind].get("open") else []
    assert closed.ids.tolist() == plain.ids.tolist() + added
    assert closed.trained.tolist() == plain.trained.tolist() + [True] * len(added)
    assert kind in ("phi-3", "llama-3") or closed.trained[-2:].any()


def test_prompts_are_trained_where_they_are_long_enough():
    chat = Conversation(TURNS)
    answers = encode("phi-4", chat, marked=True).trained.tolist()
    assert encode("phi-4", chat, marked=True, prompts="all").trained.all()
    begin = answers.index(True)
    second = answers.index(False, begin)
    gaps = begin, answers.index(True, second) - second
    some = encode("phi-4", chat, marked=True, prompts=f"length>={max(gaps)}").trained.tolist()
    assert some.count(True) == answers.count(True) + max(gaps) and min(gaps) < max(gaps)
    last = encode("phi-4", chat, marked=True, targets="last", prompts="all").trained.tolist()
    assert last.count(False) == answers.index(False, begin) - begin


def test_plain_prompts_and_completions():
    tokenizer = oracle("tulu")
    settings = ChatSettings("completion", (), None, "all", "none")
    marks = marks_of(tokenizer)
    encoder = SampleEncoder(tokenizer.backend_tokenizer.to_str(), marks, settings)
    [sample] = encoder([settings.render(Conversation(prompt="what is th", completion="e colour"))])
    whole = tokenizer("what is the colour", add_special_tokens=False)["input_ids"]
    begin = prefix(tokenizer("what is th", add_special_tokens=False)["input_ids"], whole)
    assert sample.ids.tolist() == [*whole, tokenizer.eos_token_id]
    assert sample.trained.tolist() == [at >= begin for at in range(len(whole) + 1)]
    [ended] = encoder([settings.render(Conversation(prompt="what", completion=" is<|endoftext|>"))])
    assert ended.ids.tolist().count(tokenizer.eos_token_id) == 1
    with pytest.raises(ChatFault, match=r"need a chat template: name one with chat\.template"):
        settings.render(Conversation(TURNS))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{{ raise_exception('never') }}", "chat template x: never"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took longer than 0.2 s"),
        ("{{ messages[0].content.pop() }}", "chat template x: "),
        ("{{ 1 / 0 }}", "chat template x: division by zero"),
        ("{% if %}", "chat template x: "),
    ],
    ids=["raises", "loops", "no such method", "fails", "syntax"],
)
def test_a_template_that_fails_makes_a_bad_record(text, expected, monkeypatch):
    monkeypatch.setattr("llmtrain.data.chat.template.DOCUMENT_SECONDS", 0.2)
    settings = ChatSettings("messages", (), ChatTemplate(text, {}, "x"), "all", "none")
    with pytest.raises(ChatError):
        settings.render(Conversation(TURNS))
    made, fault = settings.convert({"messages": TURNS})
    assert made == "" and fault is not None and expected in fault and "chat.template names another" in fault


def test_a_marked_template_that_marks_no_answer():
    text = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    settings = ChatSettings("messages", (), ChatTemplate(text, {}, "x"), "all", "none")
    assert settings.convert({"messages": TURNS})[1] == "chat template x marks no answer of it by {% generation %}"


@pytest.mark.parametrize("text", ["{{ messages[0].content }}", "Hello{{ '!' if add_generation_prompt }}"])
def test_rejects_a_template_that_writes_no_answer(text):
    settings = ChatSettings("messages", (), ChatTemplate(text, {}, "x"), "last", "none")
    fault = settings.convert({"messages": TURNS[:2]})[1]
    assert fault == "chat template x writes nothing of turn 2 (assistant); name another with chat.template"


def test_texts_in_parts_are_one_text():
    """As OpenAI's API has them; few templates take them apart."""
    plain = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    divided = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]
    assert conversation({"messages": divided}, "messages") == conversation({"messages": plain}, "messages")


def test_chatml_marks_answers():
    text, answers = ChatTemplate(CHATML, {}, "chatml").render(TURNS)
    assert [text[slice(*one)] for one in answers] == [f"{turn['content']}<|im_end|>" for turn in TURNS[1::2]]


ASKED, CHATML_TEMPLATE = [{"role": "user", "content": "Why?"}], ChatTemplate(CHATML, {}, "chatml")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "name, record",
    [
        ("messages", {"messages": [*ASKED, {"role": "assistant", "content": "So."}]}),
        ("completion", {"prompt": "Why?", "completion": "So."}),
        ("completion", {"prompt": ASKED, "completion": "So."}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}),
        ("alpaca", {"instruction": "Why?", "output": "So."}),
    ],
)
def test_a_system_text_beside_any_format_is_the_first_turn(name, record):
    settings = ChatSettings(name, (), CHATML_TEMPLATE, "all", "none")
    made, fault = settings.convert(record | {"system": "Be brief."})
    assert fault is None and made.startswith('["<|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nWhy?')


def test_a_system_text_needs_a_template():
    record = {"system": "Be brief.", "prompt": "Why?", "completion": " So."}
    fault = ChatSettings("completion", (), None, "all", "none").convert(record)[1]
    assert fault is not None and "has 'system', which only a chat template writes: name one with chat.template" in fault


def test_earlier_questions_of_alpaca_are_earlier_turns():
    record = {"instruction": "And then?", "output": "Rest.", "history": [["Why?", "So."]]}
    found = conversation(record, "alpaca").messages
    assert [turn["content"] for turn in found] == ["Why?", "So.", "And then?", "Rest."]
    with pytest.raises(ChatFault, match="entry 1 of 'history' is no pair"):
        conversation(record | {"history": ["Why?"]}, "alpaca")


@pytest.mark.parametrize(
    "record, lost",
    [
        ({"messages": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}, "turn 2 (assistant) has tool_calls"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}]}, "has reasoning_content"),
        ({"tools": TOOLS, "messages": [*ASKED, {"role": "assistant", "content": "So."}]}, "has tools"),
    ],
    ids=["calls", "thoughts", "tools"],
)  # fmt: skip
def test_rejects_what_the_template_would_leave_out(record, lost):
    fault = ChatSettings("messages", (), CHATML_TEMPLATE, "all", "none").convert(record)[1]
    assert fault is not None and lost in fault and "chat template chatml does not write; name another" in fault


@pytest.mark.parametrize(
    "written, expected",
    [
        ("c.function.arguments | tojson", '{"a": 1}'),  # an object, as transformers has them
        ("'' + c.function.arguments", '{"a":1}'),  # text alone
        ("c.function.arguments ~ ''", '{"a":1}'),  # an object would be written as Python has it
        ("c.function.arguments.items() | list", "[('a', 1)]"),
    ],
)
def test_arguments_of_calls_may_be_json_text(written, expected):
    loops = "{% for m in messages %}{% for c in m.tool_calls %}<{{ VALUE }}>{% endfor %}{{ m.content }}{% endfor %}"
    text = loops.replace("VALUE", written)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [*ASKED, {"role": "assistant", "content": "!", "tool_calls": [call]}]
    made, fault = ChatSettings("messages", (), ChatTemplate(text, {}, "x"), "all", "none").convert(
        {"messages": messages}
    )
    assert fault is None and json.loads(made)[0] == f"Why?<{expected}>!"


@pytest.mark.parametrize(
    "name, record, expected",
    [
        ("messages", {"messages": [{"role": ["user"], "content": "x"}]}, "turn 1 has no `role`"),
        ("messages", {"messages": [{"role": "user"}, *ASKED]}, r"turn 1 \(user\) has no content"),
        ("messages", {"functions": TOOLS, "messages": TURNS}, "'functions' is the earlier form of 'tools'"),
        ("sharegpt", {"conversations": [{"from": ["human"], "value": "x"}]}, "'from of turn 1' is list, not text"),
        ("sharegpt", {"conversations": [{"from": None, "value": "x"}]}, "'from of turn 1' is NoneType, not text"),
    ],
)
def test_rejects_turns_that_are_none(name, record, expected):
    with pytest.raises(ChatFault, match=expected):
        conversation(record, name)
