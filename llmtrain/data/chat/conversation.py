"""Records of chat and completion data as conversations: `messages`, prompt and completion, ShareGPT, Alpaca.

    recognise({"instruction", "output"})                                    # alpaca
    conversation({"prompt": "2 + 2 =", "completion": " 4"}, "completion")   # Conversation(prompt="2 + 2 =", completion=" 4")

A record that is none raises a ChatFault, whose text is a phrase: what is wrong in which turn, and what to do.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config.regular_file import parse_json

FORMATS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pairs": (("chosen", "rejected"),),
    "labels": (("prompt", "completion", "label"), ("prompt", "response", "label")),
    "messages": (("messages",),),
    "sharegpt": (("conversations",),),
    "completion": (("prompt", "completion"), ("prompt", "response")),
    "alpaca": (("instruction", "output"),),
}
"""Fields by which each format is recognised, in this order: all of one alternative."""
PREFERENCES = ("pairs", "labels")
"""Formats for `objective: preference` (preferences.py)."""
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}
_AFTER = {
    "system": {None},
    "developer": {None},
    "user": {None, "system", "developer", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}
"""Roles that may stand before each role; None: the beginning."""


class ChatFault(Exception):
    """A record that is no conversation to train on; the message is a phrase."""


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and `content`, the last of them the assistant's; or plain text, a prompt and its completion, where
    `messages` is empty. tools: descriptions for the template. system: of plain text, what a system turn would hold."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt: str = ""
    completion: str = ""
    system: str = ""

    @property
    def answers(self) -> list[int]:
        """Numbers of the assistant's messages."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]


_UNTRAINED = {"weight": lambda value: value != 1, "train": lambda value: value != 1, "loss": lambda value: value == 0}
"""Keys by which other programs leave a turn out of the loss, or count it for less, and which of their values do (True is 1). `loss`
may be a measured one."""


def recognise(keys: Collection[str]) -> str | None:
    """Name of the format that records with these fields have; None: of none."""
    for name, alternatives in FORMATS.items():
        if any(set(needed) <= set(keys) for needed in alternatives):
            return name
    return None


def conversation(record: Any, name: str, fields: Mapping[str, str] | None = None) -> Conversation:
    """The conversation of a record of the format `name`. fields: names in the records in place of a format's own fields.

    Raises ChatFault.
    """
    known, last = known_fields(record, name, fields)
    return _READERS[name](known, known[last])


def known_fields(record: Any, name: str, fields: Mapping[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """(fields, the last that the format needs) of a record, under the format's names. Raises ChatFault."""
    if not isinstance(record, Mapping):
        raise ChatFault(f"expected an object, found {type(record).__name__}")
    renamed = {*(fields or {}), *(fields or {}).values()}
    known = {key: value for key, value in record.items() if value is not None and key not in renamed}
    known |= {key: record[own] for key, own in (fields or {}).items() if record.get(own) is not None}
    needed = next((some for some in FORMATS[name] if set(some) <= known.keys()), None)
    if needed is None:
        missing = next(key for key in FORMATS[name][0] if key not in known)
        if (own := (fields or {}).get(missing, missing)) in record:
            raise ChatFault(f"'{own}' is null")
        keys = ", ".join(sorted(map(str, record))[:8]) or "none"
        raise ChatFault(f"has no '{own}' (keys: {keys}); name its field with chat.fields, or another chat.format")
    return known, needed[-1]


def messages_of(name: str, value: Any) -> list[dict[str, Any]]:
    """Messages of a list, which may be JSON text. Raises ChatFault."""
    return [read_message(one, number) for number, one in enumerate(_listed(name, value), 1)]


def _messages(record: Mapping[str, Any], messages: Any) -> Conversation:
    return checked([*system_turn(record), *messages_of("messages", messages)], record)


def _sharegpt(record: Mapping[str, Any], turns: Any) -> Conversation:
    found = system_turn(record)
    for number, turn in enumerate(_listed("conversations", turns), 1):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            if isinstance(turn, Mapping) and {"role", "content"} <= turn.keys():
                found.append(read_message(turn, number))
                continue
            raise ChatFault(f"turn {number} has no `from` and `value`")
        role = _SHAREGPT_ROLES.get(text_of(turn["from"], f"from of turn {number}"), turn["from"])
        flags = {key: turn[key] for key in _UNTRAINED if key in turn}
        found.append(read_message({"role": role, "content": turn["value"], **flags}, number))
    return checked(found, record)


def _alpaca(record: Mapping[str, Any], output: Any) -> Conversation:
    parts = [text_of(record[key], key) for key in ("instruction", "input") if record.get(key)]
    found = system_turn(record)
    for number, pair in enumerate(parsed("history", record.get("history")) or [], 1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ChatFault(f"entry {number} of 'history' is no pair of a question and its answer")
        found += _asked(*(text_of(one, f"entry {number} of history") for one in pair))
    return checked([*found, *_asked("\n\n".join(parts), text_of(output, "output"))], record)


def _asked(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _completion(record: Mapping[str, Any], completion: Any) -> Conversation:
    prompt, answer = value_of("prompt", record["prompt"]), value_of("completion", completion)
    if isinstance(prompt, list) or isinstance(answer, list):
        turns = (as_turns("user", prompt), as_turns("assistant", answer))
        return checked([*system_turn(record), *turns[0], *turns[1]], record)
    if not answer.strip():
        raise ChatFault("the completion is empty; mend the record, or leave it out")
    return Conversation(prompt=prompt, completion=answer, system=text_of(record.get("system") or "", "system"))


def value_of(key: str, value: Any) -> str | list[dict[str, Any]]:
    """Text, or messages, which may be JSON text of a list. Raises ChatFault."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[{"):
            return text_of(value, key)
        value = parsed(key, value)
    if not isinstance(value, list):
        raise ChatFault(f"'{key}' is {type(value).__name__}, not text, nor a list of turns")
    return messages_of(key, value)


def as_turns(role: str, value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def system_turn(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first turn of a record whose `system` stands beside its turns; else nothing."""
    system = text_of(record.get("system") or "", "system")
    return [{"role": "system", "content": system}] if system else []


_READERS = {"messages": _messages, "sharegpt": _sharegpt, "alpaca": _alpaca, "completion": _completion}


def text_of(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ChatFault(f"'{what}' is {type(value).__name__}, not text")
    return _unicode(value, what)


def _unicode(text: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ChatFault(f"{what} holds half of a surrogate pair, which is no text") from None
    return text


def _listed(name: str, value: Any) -> list[Any]:
    """A list, which may be given as JSON text."""
    value = parsed(name, value)
    if not isinstance(value, list) or not value:
        raise ChatFault(f"'{name}' is {'empty' if value == [] else type(value).__name__}; expected a list of turns")
    return value


def parsed(name: str, value: Any) -> Any:
    """The value of JSON text; any other value as it is. Raises ChatFault."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ChatFault(f"'{name}' is text, but no JSON: {error}") from None


def read_message(message: Any, number: int) -> dict[str, Any]:
    """A message without empty fields; `tool_calls` may be JSON text, and `content` a list of parts that are texts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        found = f", a text: it is {message['role']!r:.40}" if isinstance(message, Mapping) and "role" in message else ""
        raise ChatFault(f"turn {number} has no `role`{found}")
    found = _without_nulls(dict(message))
    untrained = next((key for key, no in _UNTRAINED.items() if key in found and no(found[key])), None)
    if untrained and message["role"] == "assistant":
        raise ChatFault(
            f"turn {number} (assistant) has {untrained}: {json.dumps(found[untrained])}, but all answers are trained, or with "
            f"chat.targets: last those of the last turn; cut the conversation, or remove {untrained}"
        )
    if "tool_calls" in found:
        found["tool_calls"] = parsed("tool_calls", found["tool_calls"])
    content = found.get("content")
    if content is None and found["role"] != "assistant":
        raise ChatFault(f"turn {number} ({found['role']}) has no content; mend the record, or leave it out")
    if isinstance(content, str):
        _unicode(content, f"turn {number}")
    elif content is not None and not isinstance(content, list):
        raise ChatFault(f"the content of turn {number} is {type(content).__name__}, not text")
    elif content and all(isinstance(part, Mapping) and "type" in part for part in content):
        if other := next((part["type"] for part in content if part["type"] != "text"), None):
            raise ChatFault(f"turn {number} has a part of type {other!r}, and only text is read")
        found["content"] = "".join(text_of(part.get("text"), f"text of turn {number}") for part in content)
    return found


def _without_nulls(value: Any) -> Any:
    """The value without fields that are null, which tables have for what other records hold there."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def checked(messages: list[dict[str, Any]], record: Mapping[str, Any]) -> Conversation:
    """A conversation whose roles are in order, and which ends with an answer. Raises ChatFault."""
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _ROLES:
            raise ChatFault(f"turn {number} has the role {role!r}; known are {', '.join(sorted(_ROLES))}")
        if before not in _AFTER[role]:
            where = f"after {before}" if before else "at the beginning"
            raise ChatFault(
                f"turn {number} ({role}) stands {where}; roles take turns: [system,] user, assistant, user, ..."
            )
        if role == "assistant" and not (_content(message).strip() or message.get("tool_calls")):
            raise ChatFault(f"turn {number} (assistant) is empty; mend the record, or leave it out")
        before = role
    if before != "assistant":
        raise ChatFault(f"the last turn is {before}'s, not the assistant's; there is no answer to train on: cut it off")
    if record.get("functions"):
        raise ChatFault(
            "'functions' is the earlier form of 'tools'; rename it, each as {type: function, function: ...}"
        )
    tools = parsed("tools", record.get("tools"))
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ChatFault("'tools' is no list of descriptions (objects), or JSON text of one")
    return Conversation(messages, _without_nulls(tools) or None)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
