"""The text of a record: of a line of JSON, or of a value that was read already. No file is opened here."""

import codecs
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

try:
    import orjson
except ImportError:  # of the extra `fast`
    orjson = None

_LONGEST_FAST = 8 << 20
"""Bytes of a line that orjson reads: it takes twelve times as much memory meanwhile."""


class RecordKey(str):
    """A `text_key` in place of the name of a field: the text is made of the whole record. Its value is the name of a field by which
    records are told from other JSON; convert: (text, error) of a record, one of the two empty."""

    convert: Callable[[Any], tuple[str, str | None]]


def record_key(name: str, convert: Callable[[Any], tuple[str, str | None]]) -> RecordKey:
    made = RecordKey(name)
    made.convert = convert
    return made


def line_text(line: memoryview, is_first: bool, text_key: str) -> tuple[str, str | None]:
    """Return what parse_line does; both are empty for a blank line too. is_first: it may begin with a byte order mark."""
    if orjson is not None and len(line) <= _LONGEST_FAST:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            pass
        else:
            text = record.get(text_key) if type(record) is dict and type(text_key) is str else None
            return (text, None) if type(text) is str else extract_text(record, text_key)
    content = line.tobytes()
    if not content.strip():
        return "", None
    return parse_line(content.removeprefix(codecs.BOM_UTF8) if is_first else content, text_key)


def parse_line(line: bytes, text_key: str) -> tuple[str, str | None]:
    """Return (text, error) of a line of JSON; one of the two is empty."""
    try:
        record = _decoded(line)
    except (ValueError, RecursionError) as error:
        return "", line_fault(error)
    return extract_text(record, text_key)


def line_fault(error: ValueError | RecursionError) -> str:
    """The reason why a line could not be decoded as JSON."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: {error.reason} at byte {error.start} of the line"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    # A ValueError besides is an integer of thousands of digits.
    reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).partition("; use sys.")[0]
    return f"not JSON that is read here: {reason}"


def _decoded(line: bytes) -> Any:
    """The value of a line of JSON. orjson is three times as fast, and stricter: what it does not take, json says."""
    if orjson is not None and len(line) <= _LONGEST_FAST:
        with suppress(orjson.JSONDecodeError):
            return orjson.loads(line)
    return json.loads(line.decode())


def extract_text(record: Any, text_key: str) -> tuple[str, str | None]:
    """Return (text, error) of a record: a mapping, or the text itself; one of the two is empty."""
    if isinstance(text_key, RecordKey):
        return text_key.convert(record)
    text = record
    if isinstance(record, dict):
        text = _field(record, text_key)
        if text is _MISSING:
            keys = ", ".join(sorted(map(str, record))[:8]) or "none"
            return "", f"has no key '{text_key}' (keys: {keys}); name another with text_key"
    elif not isinstance(record, (str, bytes)) and record is not None:
        return "", f"expected an object with the key '{text_key}', found {_kind(record)}"
    if isinstance(text, bytes):
        try:
            return text.decode(), None
        except UnicodeDecodeError as error:
            return "", f"'{text_key}' is not UTF-8: {error.reason} at byte {error.start}"
    if not isinstance(text, str):
        return "", f"'{text_key}' is {_kind(text)}, not a string"
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        return "", f"'{text_key}' holds half of a surrogate pair, which is no text"
    return text, None


def _kind(value: Any) -> str:
    """A value's kind in the words of JSON, where it has it, else of Python."""
    kinds = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return kinds.get(type(value), type(value).__name__)


_MISSING = object()


def _field(record: dict[str, Any], text_key: str) -> Any:
    if text_key in record or "." not in text_key:
        return record.get(text_key, _MISSING)
    value: Any = record
    for key in text_key.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value
