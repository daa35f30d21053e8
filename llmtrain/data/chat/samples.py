"""Conversations as tokens of which some are trained.

A conversation is rendered when its record is read, so that what is wrong has a file and a line, and tokenised with many others
later. What is trained: the answers that `{% generation %}` encloses where the template has it; else an answer's tokens lie behind
the longest common prefix of the conversation's tokens and of those of its beginning up to the answer (TRL's convention).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from llmtrain.config.regular_file import parse_json
from llmtrain.data.chat.conversation import ChatFault, Conversation, conversation
from llmtrain.data.chat.template import ChatError, ChatTemplate
from llmtrain.data.shards.packing import ENDS, TRAINED, with_flags
from llmtrain.data.sources.records import Pieces
from llmtrain.data.tokenize.encode import DocumentMarks, EncodedBatch, held_out


class Rendering(NamedTuple):
    """A conversation as text. answers: characters [begin, end) of each, marked by the template; or else turns: of each answer, the
    text before it, and that up to its end, as TRL renders them. closed: the text ends as the template ends it."""

    text: str
    answers: list[tuple[int, int]]
    turns: list[tuple[str, str]]
    closed: bool


class Sample(NamedTuple):
    """ids, trained: [n]."""

    ids: NDArray[np.uint32]
    trained: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatSettings:
    """Settings by which records become samples. name: the format. template: None for plain prompts and completions. targets:
    `last` or `all` answers. prompts: `none`, `all` or `length>=N`, the prompts that are trained as well, by their tokens."""

    name: str
    fields: tuple[tuple[str, str], ...]
    template: ChatTemplate | None
    targets: str
    prompts: str
    plain: bool = False
    """Records that are texts stay without the template; of PREFERENCES."""

    def convert(self, record: Any) -> tuple[str, str | None]:
        """(text, fault) of a record, as of extract_text: the text is a Rendering in JSON."""
        try:
            found = conversation(record, self.name, dict(self.fields))
            return json.dumps(self.render(found), ensure_ascii=False), None
        except ChatFault as fault:
            return "", str(fault)
        except ChatError as error:
            return "", f"{error}; mend the record or the template (chat.template names another)"

    def render(self, chat: Conversation) -> Rendering:
        """Raises ChatFault, and ChatError from the template."""
        if self.template is None and chat.messages:
            raise ChatFault("holds messages, which need a chat template: name one with chat.template")
        if self.template is None and chat.system:
            raise ChatFault(NO_SYSTEM)
        if self.template is None:
            text = chat.prompt + chat.completion
            return Rendering(text, [], [(chat.prompt, text)], False)
        if not chat.messages:
            turns = (("system", chat.system), ("user", chat.prompt), ("assistant", chat.completion.strip()))
            chat = Conversation([{"role": role, "content": text} for role, text in turns if text or role != "system"])
        template = self.template
        chat = replace(chat, messages=for_template(template, chat.messages, chat.tools))
        text, answers = template.render(chat.messages, tools=chat.tools)
        if template.marks_answers:
            if not answers:
                raise ChatFault(f"chat template {template.source} marks no answer of it by {{% generation %}}")
            return Rendering(text, answers, [], True)
        wanted = chat.answers if self.targets == "all" or self.prompts != "none" else chat.answers[-1:]
        return Rendering(text, [], [self._turn(chat, number, text) for number in wanted], True)

    def _turn(self, chat: Conversation, number: int, text: str) -> tuple[str, str]:
        assert self.template is not None
        before, _ = self.template.render(chat.messages[:number], tools=chat.tools, add_generation_prompt=True)
        if number == len(chat.messages) - 1:
            if common_length(before, text) == len(text):
                raise ChatFault(
                    f"chat template {self.template.source} writes nothing of turn {number + 1} (assistant); name another with "
                    "chat.template"
                )
            return before, text
        upto, _ = self.template.render(chat.messages[: number + 1], tools=chat.tools)
        begin, end = common_length(before, text), common_length(upto, text)
        content = chat.messages[number].get("content")
        if begin >= end or (isinstance(content, str) and content.strip() not in text[begin:end]):
            raise ChatFault(
                f"chat template {self.template.source} writes turn {number + 1} otherwise once further turns follow, so that its "
                "tokens cannot be found; give chat.targets: last, or a template with {% generation %}"
            )
        return before, upto


NO_SYSTEM = "has 'system', which only a chat template writes: name one with chat.template, or put it before the prompt"
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of fields for what is thought before an answer, of which a template writes one."""


def for_template(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """Messages as the template takes them: arguments of tool calls as objects, as transformers has them, unless it joins texts.

    Raises ChatFault for what the template would leave out.
    """
    if tools and not template.reads("tools"):
        raise ChatFault(f"has tools, which chat template {template.source} does not write; {_OTHER}")
    for number, message in enumerate(messages, 1):
        thoughts = [key for key in _THOUGHTS if message.get(key)]
        lost = [] if any(template.reads(key) for key in thoughts) else thoughts[:1]
        lost += [key for key in ("tool_calls", "function_call") if message.get(key) and not template.reads(key)]
        if lost:
            raise ChatFault(
                f"turn {number} ({message['role']}) has {lost[0]}, which chat template {template.source} does not write; {_OTHER}"
            )
    objects = [_with_objects(message) for message in messages]
    if objects == messages:
        return messages
    try:
        text, _ = template.render(objects, tools=tools)
    except ChatError:
        return messages
    # A template that joins them as text would write them as Python does.
    calls = [call for message in objects for call in message.get("tool_calls", ())]
    return messages if any(a and str(a) in text for a in map(_arguments, calls)) else objects


_OTHER = "name another with chat.template, or remove it"


def _arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    return function.get("arguments") if isinstance(function, dict) else None


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have objects for arguments that are JSON text of objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(isinstance(_arguments(call), str) for call in calls):
        return message
    found = []
    for call in calls:
        try:
            value = parse_json(_arguments(call))
        except (ValueError, TypeError):
            value = None
        if isinstance(value, dict) and "function" in call:
            call = call | {"function": call["function"] | {"arguments": value}}
        elif isinstance(value, dict):
            call = call | {"arguments": value}
        found.append(call)
    return message | {"tool_calls": found}


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix of two sequences, by bisection."""
    equal, different = 0, min(len(a), len(b)) + 1
    while different - equal > 1:
        middle = (equal + different) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            different = middle
    return equal


class SampleEncoder:
    """Callable that turns renderings into samples. tokenizer: the content of a tokenizer.json."""

    def __init__(self, tokenizer: str, marks: DocumentMarks, settings: ChatSettings) -> None:
        self.marks, self.settings = marks, settings
        self.backend = Tokenizer.from_str(tokenizer)
        self.backend.no_padding()
        self.backend.no_truncation()
        self.backend.encode_special_tokens = False  # the template spells them

    def __call__(self, renderings: Sequence[Rendering]) -> list[Sample]:
        texts = [text for one in renderings for text in (one.text, *_prefixes(one))]
        encoded = iter(self.backend.encode_batch(texts, add_special_tokens=False))
        return [self._sample(one, next(encoded), [next(encoded).ids for _ in _prefixes(one)]) for one in renderings]

    def _sample(self, one: Rendering, whole: Encoding, prefixes: list[list[int]]) -> Sample:
        ids = whole.ids
        if one.turns:
            begins, ends = (([common_length(prefix, ids) for prefix in prefixes[part::2]]) for part in (0, 1))
        else:
            begins, ends = _tokens_of(whole, one.answers)
        trained = self._trained(len(ids), begins, ends)
        if self._is_open(one, ids):
            ids = [*ids, self.marks.eod_id]
            trained = np.append(trained, True)
        if self.marks.bos_id is not None and ids[:1] != [self.marks.bos_id]:
            ids = [self.marks.bos_id, *ids]
            trained = np.insert(trained, 0, False)
        return Sample(np.array(ids, np.uint32), trained)

    def _trained(self, count: int, begins: Sequence[int], ends: Sequence[int]) -> NDArray[np.bool_]:
        trained = np.zeros(count, bool)
        least = {"none": count + 1, "all": 0}.get(self.settings.prompts)
        least = int(self.settings.prompts.removeprefix("length>=")) if least is None else least
        before = 0
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
            trained[begin:end] = self.settings.targets == "all" or number == len(begins)
            trained[before:begin] |= begin - before >= least
            before = end
        return trained

    def _is_open(self, one: Rendering, ids: list[int]) -> bool:
        """True if no token ends the answer: the template adds none, or none is written in plain text."""
        if not self.marks.closes:
            return False
        if not one.closed:
            return ids[-1:] != [self.marks.eod_id]
        text = one.text.rstrip()
        return not any(text.endswith(token) for token in self._special)

    @cached_property
    def _special(self) -> tuple[str, ...]:
        added = self.backend.get_added_tokens_decoder()
        found = [token.content for id, token in added.items() if token.special or id == self.marks.eod_id]
        return tuple(text for text in found if text)


def _prefixes(one: Rendering) -> list[str]:
    return [text for turn in one.turns for text in turn]


def _tokens_of(whole: Encoding, answers: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """First tokens, and those behind the last ones, of ranges of characters: all tokens that share a character with them."""
    spans = np.array(whole.offsets, np.int64).reshape(-1, 2)
    begins = np.searchsorted(spans[:, 1], [begin for begin, _ in answers], side="right")
    ends = np.searchsorted(spans[:, 0], [end for _, end in answers], side="left")
    return begins.tolist(), ends.tolist()


def rendering_of(text: str) -> Rendering:
    """The Rendering that `ChatSettings.convert` has written."""
    text, answers, turns, closed = parse_json(text)
    return Rendering(text, [(begin, end) for begin, end in answers], [(a, b) for a, b in turns], closed)


class ChatBatch(NamedTuple):
    """encoded: its ids have flags. cut: [p] tokens that did not fit a sample, of each conversation; useless: [p] conversations
    without a trained token, which are not to be stored."""

    encoded: EncodedBatch
    cut: NDArray[np.int64]
    useless: NDArray[np.bool_]


class ChatEncoder:
    """Callable that tokenises conversations, each cut to `seq_len` tokens. tokenizer: the content of a tokenizer.json."""

    def __init__(
        self, tokenizer: str, marks: DocumentMarks, settings: ChatSettings, seq_len: int, seed: int, fraction: float
    ) -> None:
        """seed, fraction: of the split into training and validation."""
        self._encode = SampleEncoder(tokenizer, marks, settings)
        self._seq_len, self._seed, self._fraction = seq_len, seed, fraction

    def __call__(self, batch: Sequence[Pieces]) -> ChatBatch:
        renderings = [rendering_of(text) for some in batch for text in some.texts]
        samples, size = self._encode(renderings), self._seq_len
        whole = np.array([len(one.ids) for one in samples], np.int64)
        tokens = np.minimum(whole, size)
        text_bytes = [len(one.text.encode()) for one in renderings]
        ids = [flagged(one, size) for one in samples]
        useless = np.array([not has_label(one, size) for one in samples], bool)
        held = held_out_of(batch, self._seed, self._fraction)
        return ChatBatch(encoded(held, tokens, text_bytes, ids), whole - tokens, useless)


def held_out_of(batch: Sequence[Pieces], seed: int, fraction: float) -> NDArray[np.bool_]:
    """Records of validation: [p], true for each of them."""
    return np.array([out for some in batch for out in held_out(some, seed, fraction)], bool)


def flagged(one: Sample, size: int, further: int = 0) -> NDArray[np.uint32]:
    """The first `size` tokens of a document with their flags. further: flags of each of them."""
    flags = one.trained[:size].astype(np.uint8) * np.uint8(TRAINED) | np.uint8(further)
    flags[-1:] |= ENDS
    return with_flags(one.ids[:size], flags)


def has_label(one: Sample, size: int) -> bool:
    """True if one of the first `size` tokens is trained. The first token of a document is no label."""
    return bool(one.trained[1:size].any())


def encoded(
    held: NDArray[np.bool_], tokens: NDArray[np.int64], text_bytes: Sequence[int], ids: Sequence[NDArray[np.uint32]]
) -> EncodedBatch:
    """Whole records, of which each ends. tokens, text_bytes: of each; ids: of all in order."""
    return EncodedBatch(
        held_out=held,
        ends=np.ones(len(tokens), bool),
        tokens=tokens,
        text_bytes=np.array(text_bytes, np.int64),
        ids=np.concatenate([np.zeros(0, np.uint32), *ids]),
        held_bytes=np.zeros(int(tokens[held].sum()), np.int64),
    )
