"""Checksums of JSON lines and JSON files: xxh3_128 (https://xxhash.com) of the content, as its last key.

They find damage, as of a disk or a proxy; they are no defence against someone who writes files with intent. What was
written before there were checksums is still read.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.errors import UserError

KEY = "xxh3_128"
_END = re.compile(rb',?\s*"xxh3_128": "([0-9a-f]{32})"\n?\}')
_END_BYTES = 64


class DamagedError(UserError):
    """Content that is not what was written, or no JSON object; the message says which."""


def checksum(content: bytes) -> str:
    """xxh3_128 in hex."""
    return xxhash.xxh3_128_hexdigest(content)


def encode_record(record: Mapping[str, Any]) -> bytes:
    """A JSON object on a line of its own, with its checksum."""
    return _with_checksum(json.dumps(record, ensure_ascii=False), b" ", b"}")


def encode_json(content: Mapping[str, Any]) -> bytes:
    """A JSON object over several lines, with its checksum."""
    return _with_checksum(json.dumps(content, indent=1, ensure_ascii=False), b"\n ", b"\n}")


def decode(content: bytes) -> tuple[dict[str, Any], bool]:
    """(the object without its checksum, whether it has one) of a record or a file.

    Raises DamagedError if the checksum differs, or if the content is no JSON object. What has no checksum is returned as it is.
    """
    text = content.removesuffix(b"\n")
    try:
        found = parse_json(text.decode())
    except ValueError:
        raise DamagedError("is no JSON") from None
    if not isinstance(found, dict):
        raise DamagedError("is no JSON object")
    if KEY not in found:
        return found, False
    end = _END.search(text, max(len(text) - _END_BYTES, 0))
    if end is None or end.end() != len(text) or end[1].decode() != checksum(_body(text, end.start())):
        raise DamagedError(f"is not what was written (its {KEY} differs)")
    del found[KEY]
    return found, True


@dataclass(frozen=True)
class Records:
    """Records of a file. damaged: the number (from 1) of each line that is damaged or was cut short, and why."""

    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)


def read_records(path: Path) -> Records:
    """Read a file of records; empty lines are left out.

    Lines without a checksum count until the first line that has one: a file may have been begun by an earlier version.
    Raises OSError.
    """
    with open_regular(path) as file:
        lines = file.read().split(b"\n")
    found, hashed = Records(), False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record, has_checksum = decode(line)
            if hashed and not has_checksum:
                raise DamagedError(f"has no {KEY}")
        except DamagedError as error:
            found.damaged[number] = str(error)
            continue
        hashed = hashed or has_checksum
        found.records.append(record)
    return found


def _with_checksum(text: str, indent: bytes, end: bytes) -> bytes:
    """JSON text, which ends in `end`, with its checksum as the last key, and a line break."""
    whole = text.encode(errors="backslashreplace")  # half of a surrogate pair: JSON writes it so too
    body = whole.removesuffix(end)
    if body == whole:  # an empty object over several lines is on one
        body, end = whole.removesuffix(b"}"), b"}"
    comma = b"" if body == b"{" else b","
    return body + comma + indent + f'"{KEY}": "{checksum(whole)}"'.encode() + end + b"\n"


def _body(text: bytes, end: int) -> bytes:
    """The text before its checksum was added. end: where the added key begins."""
    return text[:end] + (b"\n}" if text.endswith(b"\n}") else b"}")
