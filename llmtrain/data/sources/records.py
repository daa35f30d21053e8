"""Reading the documents of a part of a source file. Memory: a block of about a megabyte, or the longest record."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from llmtrain.data.sources.compression import DAMAGES, decompress
from llmtrain.data.sources.files import SourceFile
from llmtrain.data.sources.formats import Format, NoSuchColumn, NotText, plain_name, sniff
from llmtrain.data.sources.record_text import extract_text, line_text
from llmtrain.data.sources.storage import open_file

BLOCK_BYTES = 1 << 20
"""A text longer than this is several pieces, each of the lines that begin in one block of the file."""
LONGEST_LINE = 8 << 20
"""A line of a text that is longer is cut, between two characters. A record is never cut."""
LONGEST_RECORD = 256 << 20
"""Bytes of a line of JSON; a longer one is no record, and reading it would take eight times as much memory."""
_RECORD_BLOCK = 1 << 18
"""Bytes of JSON lines that are read at a time: they stay in a core's cache."""
_UNITS = {"text": "file", "jsonl": "line"}
"""What the number of a document counts; `record` for all other formats."""


@dataclass(frozen=True)
class Slice:
    """Part of a file: what begins in [begin, end), in bytes as stored. Lines and row groups are not cut."""

    file: SourceFile
    begin: int
    end: int


@dataclass(frozen=True)
class DocumentPiece:
    """Text of one document, or of a part of it: a long text file is several pieces, and the last one has `ends`."""

    name: str
    text: str
    ends: bool
    record: int = 0
    """Number of the record, from 0: among the lines that begin in its slice, or else in the file."""
    begins: bool = True
    """False for a piece of a text that is not its first."""


class Pieces(NamedTuple):
    """Pieces of documents that follow one another in a slice: records, each a document, or one piece of a text.

    records: the number of each, as in DocumentPiece; places: the byte or row of each; None for a text, which has the file's name.
    weight: of all records that were read for them; see BadRecord.
    """

    file: str
    texts: list[str]
    records: list[int]
    places: list[int] | None
    begins: bool = True
    ends: bool = True
    weight: int = 0

    def name(self, number: int) -> str:
        """Name of a piece's document."""
        return self.file if self.places is None else f"{self.file}@{self.places[number]}"

    def each(self) -> Iterator[DocumentPiece]:
        for number, (text, record) in enumerate(zip(self.texts, self.records, strict=True)):
            yield DocumentPiece(self.name(number), text, self.ends, record, self.begins)

    def select(self, numbers: list[int]) -> Pieces:
        """Some of the pieces."""
        places = None if self.places is None else [self.places[number] for number in numbers]
        texts, records = ([column[number] for number in numbers] for column in (self.texts, self.records))
        return self._replace(texts=texts, records=records, places=places)


@dataclass(frozen=True)
class BadRecord:
    """A record, or all of a slice, that could not be read. where: file:line (or the file); why: a phrase."""

    where: str
    why: str
    fatal: bool = True
    """False for a file found in a folder that turned out not to be text: passed over and named, unless max_bad is given."""
    nbytes: int = 0
    """Of a slice, as stored."""
    weight: int = 0
    """Of a record beside the others of its slice: bytes of a line of JSON, all fields counted; 1 in a table or an array."""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class SetAside(Exception):
    """A slice of which nothing is to be used, also not the pieces read so far: it is damaged, or is no text."""

    def __init__(self, bad: BadRecord) -> None:
        super().__init__(str(bad))
        self.bad = bad


def whole(file: SourceFile) -> Slice:
    return Slice(file, 0, file.size)


def read_slice(part: Slice, text_key: str) -> Iterator[DocumentPiece | BadRecord]:
    """Yield the documents of a slice and its unreadable records. Raises SetAside. See read_pieces."""
    for item in read_pieces(part, text_key):
        if isinstance(item, BadRecord):
            yield item
        else:
            yield from item.each()


def read_pieces(
    part: Slice, text_key: str, told: Callable[[str, int], None] | None = None
) -> Iterator[Pieces | BadRecord]:
    """Yield the documents of a slice, many at a time, and its unreadable records, all in order. Raises SetAside.

    text_key: the field of a record that holds its text; `a.b` is the field b of the field a, unless there is a field `a.b`.
    told: called with what a record's number counts (see provenance.SourceSlice), and at the end with the lines of the slice.
    """
    file = part.file
    where, found = file.path, None
    try:
        with open_file(file.path) as stream:
            found = sniff(stream, file.name, text_key, file.from_folder)
            stream.seek(0)
            with decompress(stream, found.compression) as plain:
                source, unit = _Source(part, found, text_key, plain), _UNITS.get(found.kind, "record")
                if told:
                    told(unit, 0)
                yield from _read(source)
                if told:
                    told(unit, source.lines)
    except NotText as error:
        raise SetAside(BadRecord(where, str(error), not file.from_folder, part.end - part.begin)) from error
    except DAMAGES as error:
        reason = getattr(error, "strerror", None) or str(error)
        told_by_content = found and (found.compression or found.kind in ("parquet", "arrow"))
        if found and told_by_content and not isinstance(error, NoSuchColumn):
            reason = f"damaged {found.compression or found.kind} file: {reason}"
        raise SetAside(BadRecord(where, reason, nbytes=part.end - part.begin)) from error


@dataclass
class _Source:
    """An open slice. stream: uncompressed bytes from the file's beginning."""

    part: Slice
    format: Format
    text_key: str
    stream: BinaryIO
    lines: int = 0
    """Lines that were read, of JSON lines."""

    @property
    def end(self) -> int | None:
        """End of the slice in the stream; None for a compressed file, which is always read whole."""
        return None if self.format.compression else self.part.end

    @property
    def name(self) -> str:
        """Beginning of the names of records: the same for a compressed file."""
        return plain_name(self.part.file.name) if self.format.compression else self.part.file.name


def _read(source: _Source) -> Iterator[Pieces | BadRecord]:
    kind = source.format.kind
    if kind == "text":
        yield from _text(source)
    elif kind == "jsonl":
        yield from _json_lines(source)
    else:
        yield from _rows(source)


def _rows(source: _Source) -> Iterator[Pieces | BadRecord]:
    from llmtrain.data.sources import tables  # pyarrow takes a third of a second

    part, kind = source.part, source.format.kind
    texts: list[str] = []
    numbers: list[int] = []
    characters = weight = 0
    for row, value in tables.READERS[kind](source.stream, part.begin, part.end, source.text_key, part.file.name):
        text, fault = ("", value) if isinstance(value, tables.Fault) else extract_text(value, source.text_key)
        weight += not fault
        if text:
            texts.append(text)
            numbers.append(row)
            characters += len(text)
        if texts and (fault or characters >= BLOCK_BYTES):
            yield Pieces(source.name, texts, numbers, numbers, weight=weight)
            texts, numbers, characters, weight = [], [], 0, 0
        if fault:
            yield BadRecord(f"{part.file.path}: record {row + 1}", fault, weight=1)
    if texts:
        yield Pieces(source.name, texts, numbers, numbers, weight=weight)


def _lines(source: _Source, block: int, longest: int = -1) -> Iterator[tuple[bytes, int, bool]]:
    """Blocks of the whole lines that begin in the slice: (bytes, offset in the file, last of the file).

    block: a block holds the lines that begin between two multiples of it in the file.

    longest: bytes after which a line is cut all the same, between two characters of UTF-8; -1 for never.
    """
    stream, end = source.stream, source.end
    at = _next_line(stream, source.part.begin) if source.part.begin else 0
    rest, cut = b"", False
    while end is None or at < end or cut:
        data = rest
        if not cut:
            boundary = (at // block + 1) * block
            data = stream.read((boundary if end is None else min(boundary, end)) - at)
        if cut or not data.endswith(b"\n"):
            data += stream.readline(longest)
        if not data:
            if end is not None:
                raise EOFError("it has become shorter while it was read")
            return
        start, at = at, at + len(data)
        last = at >= source.part.file.size if end is not None else not stream.peek(1)  # type: ignore[attr-defined]
        rest, cut = b"", 0 < longest <= len(data) and not last and not data.endswith(b"\n")
        if cut:
            data, rest = _between_characters(data)
            at -= len(rest)
        yield data, start, last


def _next_line(stream: BinaryIO, begin: int) -> int:
    """Move to the first line that begins at `begin` or behind it. Returns where that is."""
    stream.seek(begin - 1)  # the byte before may be the line break
    at = begin - 1
    while part := stream.readline(BLOCK_BYTES):
        at += len(part)
        if part.endswith(b"\n"):
            break
    return at


def _between_characters(data: bytes) -> tuple[bytes, bytes]:
    """Cut off the beginning of a character of UTF-8 at the end."""
    for back in range(1, 4):
        if data[-back] & 0xC0 == 0xC0:  # the first byte of a character
            return (data[:-back], data[-back:]) if back < _width(data[-back]) else (data, b"")
    return data, b""


def _width(first: int) -> int:
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2


def _text(source: _Source) -> Iterator[Pieces]:
    file, lines = source.part.file, 0
    for data, at, last in _lines(source, BLOCK_BYTES, LONGEST_LINE):
        fault, position = "not text: it holds a NUL byte", data.find(b"\0")
        if position < 0:
            try:
                text = data.removeprefix(codecs.BOM_UTF8 if at == 0 else b"").decode()
            except UnicodeDecodeError as error:
                fault, position = f"not UTF-8: {error.reason} at byte {at + error.start}", error.start
            else:
                lines += data.count(b"\n")
                if text or last:
                    yield Pieces(file.name, [text], [0], None, begins=at == 0, ends=last)
                continue
        line = _line_at(source, source.part.begin) + lines + data.count(b"\n", 0, position)
        lost = source.part.end - source.part.begin
        raise SetAside(BadRecord(f"{file.path}:{line}", fault, not file.from_folder, lost))


def _json_lines(source: _Source) -> Iterator[Pieces | BadRecord]:
    path, key, first, number = source.part.file.path, source.text_key, None, 0
    for data, at, last in _lines(source, min(_RECORD_BLOCK, BLOCK_BYTES), LONGEST_RECORD):
        if not last and not data.endswith(b"\n"):
            line = _line_at(source, source.part.begin) + number + data.count(b"\n")
            fault = (
                f"a line of more than {LONGEST_RECORD >> 20} MiB, which is no record; divide it, or leave the file out"
            )
            lost = source.part.end - source.part.begin
            raise SetAside(BadRecord(f"{path}:{line}", fault, not source.part.file.from_folder, lost))
        texts, records, places = [], [], []
        begin, told, size, whole = 0, 0, len(data), memoryview(data)
        while begin < size:
            end = data.find(b"\n", begin)  # not splitlines(): only \n separates records
            end = size if end < 0 else end
            text, fault = line_text(whole[begin:end], at + begin == 0, key)
            if text:
                texts.append(text)
                records.append(number)
                # The byte offset is the same for a compressed file and for any division into slices.
                places.append(at + begin)
            elif fault:
                if texts:
                    yield Pieces(source.name, texts, records, places, weight=begin - told)
                    texts, records, places = [], [], []
                told = end + 1
                first = first or _line_at(source, source.part.begin)
                yield BadRecord(f"{path}:{first + number}", fault, weight=told - begin)
            number += 1
            begin = end + 1
        source.lines = number
        if texts:
            yield Pieces(source.name, texts, records, places, weight=begin - told)


def _line_at(source: _Source, offset: int) -> int:
    """Number of the first line of a slice. Slow (it reads all text before it), so for bad records only."""
    line = 1
    if offset:
        with open_file(source.part.file.path) as stream:
            while offset > 0 and (block := stream.read(min(offset, BLOCK_BYTES))):
                line += block.count(b"\n")
                offset -= len(block)
            line += bool(block) and not block.endswith(b"\n")  # the slice begins behind the line that `offset` is in
    return line
