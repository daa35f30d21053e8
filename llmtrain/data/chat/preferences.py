"""Records of preferences: pairs of a chosen and a rejected answer, and answers with a label, and their shards' samples.

    preference({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "pairs")
    preference({"prompt": "2 + 2 =", "completion": " 5", "label": False}, "labels")

Without a `prompt`, that of a pair is what both answers begin with. A sample of the shards holds whole pairs: documents chosen,
rejected, chosen, rejected, ...; of labels, each answer and then the answer of another record behind the same prompt, by which kto
estimates the divergence from its reference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmtrain.data.chat.conversation import ChatFault, as_turns, checked, known_fields, system_turn, value_of
from llmtrain.data.chat.samples import (
    NO_SYSTEM,
    ChatBatch,
    ChatEncoder,
    ChatSettings,
    Rendering,
    Sample,
    encoded,
    flagged,
    for_template,
    has_label,
    held_out_of,
)
from llmtrain.data.chat.template import ChatError
from llmtrain.data.shards.packing import UNDESIRABLE
from llmtrain.data.sources.records import Pieces

Text = str | list[dict[str, Any]]
"""Text, or messages."""


@dataclass(frozen=True)
class Preference:
    """Answers to one prompt: the chosen and the rejected one, or one that is desirable or not. tools: as a Conversation's."""

    prompt: Text
    answers: list[Text]
    desirable: bool = True
    tools: list[Any] | None = None
    system: list[dict[str, Any]] = field(default_factory=list)
    """A turn before a prompt that is text."""


_ASKED = ("question", "instruction", "query", "input")
"""Fields that are prompts under other names."""


def preference(record: Any, name: str, fields: Mapping[str, str] | None = None) -> Preference:
    """The preference of a record of the format `name`, which is one of PREFERENCES. fields: as conversation's. Raises ChatFault."""
    known, _ = known_fields(record, name, fields)
    if name == "pairs":
        keys = ["chosen", "rejected"]
    else:
        label = known["label"]
        if not isinstance(label, bool) and label not in (0, 1):
            raise ChatFault(f"'label' is {json.dumps(label, default=str)[:40]}; expected true (desirable) or false")
        keys = ["completion" if "completion" in known else "response"]
    answers = [value_of(key, known[key]) for key in keys]
    prompt = value_of("prompt", known["prompt"]) if "prompt" in known else None
    if len({type(answer) for answer in answers}) > 1:
        raise ChatFault("'chosen' is text and 'rejected' are messages, or the other way round; give both alike")
    if len(answers) == 2 and answers[0] == answers[1]:
        raise ChatFault("'chosen' and 'rejected' are the same, so that nothing can be learned; leave the record out")
    if (
        prompt is None
        and (asked := next((key for key in _ASKED if known.get(key)), None))
        and isinstance(answers[0], str)
    ):
        raise ChatFault(
            f"has '{asked}' but no 'prompt'; give chat.fields: {{prompt: {asked}}} (--chat-field prompt={asked}), or remove it"
        )
    prompt, answers = _divided(prompt, answers)
    system = system_turn(known)
    if isinstance(prompt, list):
        prompt, system = [*system, *prompt], []
    tools = None
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, str):
            if not answer.strip():
                raise ChatFault(f"'{key}' is empty; mend the record, or leave it out")
        else:
            assert isinstance(prompt, list)
            try:
                tools = checked([*prompt, *answer], known).tools
            except ChatFault as fault:
                raise ChatFault(f"prompt and '{key}': {fault}") from None
    return Preference(prompt, answers, bool(known.get("label", True)), tools, system)


def _divided(prompt: Text | None, answers: Sequence[Text]) -> tuple[Text, list[Text]]:
    """The prompt and what follows it in each answer. Raises ChatFault."""
    if isinstance(prompt, str) and isinstance(answers[0], list):
        # Answers that are whole conversations begin with the prompt themselves.
        prompt = None if answers[0][0]["role"] != "assistant" else [{"role": "user", "content": prompt}]
    if isinstance(prompt, list):
        answers = [as_turns("assistant", answer) for answer in answers]
        if all(len(answer) > len(prompt) and answer[: len(prompt)] == prompt for answer in answers):
            answers = [answer[len(prompt) :] for answer in answers]
    if prompt is not None:
        return prompt, [*answers]
    if len(answers) == 1:  # a conversation
        return answers[0][:-1], [answers[0][-1:]]
    a, b = answers
    size = next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
    if isinstance(a, str) and a[:size].endswith(" "):
        size -= 1  # the space before a word is the word's
    if not size and isinstance(a, list):
        raise ChatFault("the conversations in 'chosen' and 'rejected' begin differently; give both the same first turn")
    if not size:
        raise ChatFault("'chosen' and 'rejected' begin differently, and there is no 'prompt'; give one")
    if isinstance(a, list) and size == min(len(a), len(b)):
        raise ChatFault(
            "one of 'chosen' and 'rejected' is the beginning of the other; give both an answer of their own"
        )
    return a[:size], [a[size:], b[size:]]


def convert(settings: ChatSettings, record: Any) -> tuple[str, str | None]:
    """(text, fault) of a record, as of ChatSettings.convert: the text is JSON of its renderings, and whether it is desirable."""
    try:
        found = preference(record, settings.name, dict(settings.fields))
        renderings = [_rendering(settings, found, answer) for answer in found.answers]
    except ChatFault as fault:
        return "", str(fault)
    except ChatError as error:
        return "", f"{error}; mend the record or the template (chat.template names another)"
    return json.dumps({"answers": renderings, "desirable": found.desirable}, ensure_ascii=False), None


def texts_of(text: str) -> list[str]:
    """The answers with their prompts of what `convert` has written."""
    return [one[0] for one in json.loads(text)["answers"]]


def _rendering(settings: ChatSettings, of: Preference, answer: Text) -> Rendering:
    prompt, template = of.prompt, settings.template
    if isinstance(prompt, str) and isinstance(answer, str):
        if settings.plain or template is None:
            if of.system:
                raise ChatFault(NO_SYSTEM)
            return Rendering(prompt + answer, [], [(prompt, prompt + answer)], False)
        prompt = [*of.system, {"role": "user", "content": prompt}]
        answer = [{"role": "assistant", "content": answer.strip()}]
    if template is None:
        raise ChatFault("holds messages, which need a chat template: name one with chat.template")
    assert isinstance(prompt, list) and isinstance(answer, list)
    messages = for_template(template, [*prompt, *answer], of.tools)
    before, _ = template.render(messages[: len(prompt)], tools=of.tools, add_generation_prompt=True)
    whole, _ = template.render(messages, tools=of.tools)
    return Rendering(whole, [], [(before, whole)], True)


class PreferenceEncoder(ChatEncoder):
    """Callable that tokenises preferences, each as one piece of two documents, which fit a sample together."""

    def __call__(self, batch: Sequence[Pieces]) -> ChatBatch:
        records = [json.loads(text) for some in batch for text in some.texts]
        renderings = [Rendering(*one) for record in records for one in record["answers"]]
        samples = self._encode(renderings)
        if records and len(records[0]["answers"]) == 1:
            pairs = [(one, _mismatched(one, samples[number - 1])) for number, one in enumerate(samples)]
        else:
            pairs = [_aligned(a, b) for a, b in zip(samples[::2], samples[1::2], strict=True)]
        ids, tokens, cut, useless = [], [], [], []
        for record, pair in zip(records, pairs, strict=True):
            sizes = _fitting([len(one.ids) for one in pair], self._seq_len)
            tokens.append(sum(sizes))
            cut.append(sum(len(one.ids) for one in pair) - sum(sizes))
            cuts = list(zip(pair, sizes, strict=True))
            useless.append(not all(has_label(one, size) for one, size in cuts))
            ids += [flagged(one, size, 0 if record["desirable"] else UNDESIRABLE) for one, size in cuts]
        text_bytes = [sum(len(one[0].encode()) for one in record["answers"]) for record in records]
        held = held_out_of(batch, self._seed, self._fraction)
        found = encoded(held, np.array(tokens, np.int64), text_bytes, ids)
        return ChatBatch(found, np.array(cut, np.int64), np.array(useless, bool))


def _aligned(a: Sample, b: Sample) -> tuple[Sample, Sample]:
    """Both answers begin at the same token: where a tokenizer joins the end of the prompt with one of them, before it."""
    begin = min(_begin(a), _begin(b))
    for one in (a, b):
        one.trained[begin:] = True
    return a, b


def _begin(of: Sample) -> int:
    return int(of.trained.argmax()) if of.trained.any() else len(of.trained)


def _mismatched(of: Sample, other: Sample) -> Sample:
    """The prompt of one record and the answer of another."""
    begin, answer = _begin(of), _begin(other)
    return Sample(
        np.concatenate((of.ids[:begin], other.ids[answer:])),
        np.concatenate((of.trained[:begin], other.trained[answer:])),
    )


def _fitting(sizes: list[int], room: int) -> list[int]:
    """Lengths to which two documents are cut so that both fit: the longer loses first."""
    first, second = sizes
    if first + second <= room:
        return sizes
    half = room // 2
    if first <= half:
        return [first, room - first]
    return [room - second, second] if second <= room - half else [half, room - half]
