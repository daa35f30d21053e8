"""The format of a source file, recognised by its first bytes. The name decides only where the bytes leave a choice."""

import codecs
import json
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from llmtrain.data.sources.compression import (
    DAMAGES,
    EXTENSIONS,
    Compression,
    compression_of,
    decompress,
    is_cut_within_magic,
)
from llmtrain.data.sources.storage import open_file

Kind = Literal["text", "jsonl", "json", "csv", "parquet", "arrow"]
HEAD_BYTES = 1 << 16
JSONL_EXTENSIONS = frozenset({".jsonl", ".ndjson"})
CSV_EXTENSIONS = frozenset({".csv", ".tsv"})
_BINARY = {
    b"PK\x03\x04": "a ZIP archive",
    b"%PDF": "a PDF",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"\x04\x22\x4d\x18": "LZ4, which is not read: give it as .zst or .gz",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"SQLite format 3\0": "an SQLite database",
    b"\x7fELF": "a program",
}


class NotText(Exception):
    """A file that holds no text that can be read; the message says what it is."""


class NoSuchColumn(OSError):
    """A table that is whole, but has no text where it is looked for."""


@dataclass(frozen=True)
class Format:
    """kind: of what the file holds once decompressed; a `jsonl` is read line by line, a `json` as values of many lines."""

    kind: Kind
    compression: Compression | None = None

    @property
    def splits(self) -> bool:
        """True if a part of the file can be read without what is before it."""
        return self.compression is None and self.kind in ("text", "jsonl", "parquet")


def plain_name(name: str) -> str:
    """The name without the extension of a compression."""
    stem, extension = os.path.splitext(name)
    return stem if extension.lower() in EXTENSIONS else name


def sniff(stream: BinaryIO, name: str, text_key: str, from_folder: bool) -> Format:
    """The format of a file, read from its beginning.

    from_folder: found in a folder, not named: then JSON without the field `text_key` is a text, as settings of a source tree are.
    A file named as a table is always one. Raises NotText, and one of DAMAGES for a file that cannot be read.
    """
    head = stream.read(HEAD_BYTES)
    compression = compression_of(head)
    _refuse_cut(head, os.path.splitext(name)[1].lower())
    if compression:
        stream.seek(0)
        try:
            with decompress(stream, compression) as plain:
                head = plain.read(HEAD_BYTES)
        except DAMAGES as error:
            raise EOFError(f"damaged {compression} file: {error}") from error
        if within := compression_of(head):
            raise NotText(f"not text: {within} within {compression}; decompress it once")
    return Format(_kind(head, plain_name(name), text_key, from_folder), compression)


def _refuse_cut(head: bytes, extension: str) -> None:
    """Raise EOFError for a file that ends before its content shows what its name says."""
    named = EXTENSIONS.get(extension)
    if named and is_cut_within_magic(head, named):
        raise EOFError(f"damaged {named} file: it ends after {len(head)} bytes")
    if not head and extension in (".parquet", ".arrow"):
        raise EOFError(f"damaged {extension[1:]} file: it is empty")


def format_of(path: str, name: str, text_key: str, from_folder: bool) -> Format | None:
    """Format that `sniff` finds in a file; None for one that is no text or damaged, which is said where it is read."""
    try:
        with open_file(path) as stream:
            return sniff(stream, name, text_key, from_folder)
    except (NotText, *DAMAGES):
        return None


def is_structured(path: str) -> bool:
    """True if the content alone shows that a file holds records: Parquet, Arrow, JSON lines with `text`, any of them compressed."""
    found = format_of(path, "", "text", from_folder=True)
    return found is not None and found.kind != "text"


def _kind(head: bytes, name: str, text_key: str, from_folder: bool) -> Kind:
    extension = os.path.splitext(name)[1].lower()
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    _refuse_binary(head)
    if extension in JSONL_EXTENSIONS:
        return "jsonl"
    text = head.removeprefix(codecs.BOM_UTF8)
    if extension in CSV_EXTENSIONS:
        return "csv"
    return _json_kind(text, extension, text_key, from_folder) or "text"


def _refuse_binary(head: bytes) -> None:
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise NotText("UTF-32, not UTF-8; `iconv -t UTF-8` converts it")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise NotText("UTF-16, not UTF-8; `iconv -f UTF-16 -t UTF-8` converts it")
    for magic, what in _BINARY.items():
        if head.startswith(magic):
            raise NotText(f"not text: {what}")
    if head[257:262] == b"ustar":
        raise NotText("not text: a tar archive; unpack it")


def delimiter(extension: str) -> str:
    return "\t" if extension == ".tsv" else ","


def _json_kind(head: bytes, extension: str, text_key: str, from_folder: bool) -> Kind | None:
    text = head.lstrip()
    if text.startswith(b"["):
        if not re.match(rb"\[\s*\{", text):
            return "json" if extension == ".json" and not from_folder else None
        return None if from_folder and not _names_key(text, text_key) else "json"
    if not text.startswith(b"{"):
        return None
    lines = text.split(b"\n", 2)
    first = _object(lines[0]) if len(lines) > 1 or len(head) < HEAD_BYTES else _begun_object(lines[0])
    if first is None:  # an object of several lines
        return "json" if extension == ".json" and not from_folder else None
    if not from_folder or _names_key(lines[0], text_key):
        return "jsonl"
    return "jsonl" if len(lines) > 1 and _object(lines[1]) is not None and extension in (".json", "") else None


def _names_key(text: bytes, text_key: str) -> bool:
    return json.dumps(text_key.partition(".")[0]).encode() in text


def _object(line: bytes) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _begun_object(line: bytes) -> Any:
    """Not None for the beginning of an object in a line that is longer than the head."""
    return re.match(rb'\{\s*"', line)
