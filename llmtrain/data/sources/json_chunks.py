"""A long list in JSON, some elements at a time, since all of them as objects at once would take several times the text's memory."""

import json
import re
from collections.abc import Generator, Iterator
from typing import Any

_CHUNK = 4096
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


class NoSuchList(Exception):
    """The object has no such list, or has it twice."""


def list_in_chunks(text: str, name: str) -> Iterator[list[Any]]:
    """Yield the elements of the list that an object has under a name, up to 4,096 at a time. text: the object, in JSON. Raises
    NoSuchList, or ValueError for what is no JSON."""
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        json.loads(text)
        raise NoSuchList(f"it has no {name!r}")
    position, found = _skip(text, position + 1), False
    more = text[position : position + 1] != "}"
    while more:
        key, position = _DECODER.raw_decode(text, position)
        position = _expect(text, position, ":")
        if key == name and text[position : position + 1] == "[":
            if found:
                raise NoSuchList(f"it has {name!r} twice")
            found = True
            position = yield from _elements(text, _skip(text, position + 1))
        else:
            value, position = _DECODER.raw_decode(text, position)
            if key == name:
                raise NoSuchList(f"{name}: expected a list, found {type(value).__name__}")
        position = _skip(text, position)
        more = text[position : position + 1] != "}"
        position = _expect(text, position, ",") if more else position
    if _skip(text, position + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, position + 1)
    if not found:
        raise NoSuchList(f"it has no {name!r}")


def _elements(text: str, position: int) -> Generator[list[Any], None, int]:
    """The elements of a list from behind its bracket. Returns the position behind it."""
    chunk: list[Any] = []
    more = text[position : position + 1] != "]"
    while more:
        value, position = _DECODER.raw_decode(text, position)
        chunk.append(value)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
        position = _skip(text, position)
        more = text[position : position + 1] != "]"
        position = _expect(text, position, ",") if more else position
    yield chunk
    return position + 1


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise json.JSONDecodeError(f"Expecting {character!r}", text, position)
    return _skip(text, position + 1)
