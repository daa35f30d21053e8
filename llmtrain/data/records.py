"""Dividing source files into units of work, and reading their documents. At most one unit is in memory.

A unit is about a megabyte: several small files, a byte range of a large one, or a block of lines of a compressed one
(which can only be read from its beginning: the parent process decompresses it, the workers do the rest). Ranges
and blocks begin and end at line breaks.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import zstandard

from llmtrain.data.source_files import PrepareError, SourceFile

UNIT_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """Whole lines of one file: those that begin in [begin, end), counted in bytes of the uncompressed file."""

    file: SourceFile
    begin: int
    end: int
    last: bool
    """True for the span at the end of the file."""
    data: bytes | None = None
    """The lines themselves, when the file is compressed."""
    first_line: int | None = None
    """1-based number of the first line; None when that would need reading the text before it."""


@dataclass(frozen=True)
class DocumentPiece:
    """Text of one document, or of a part of it: a long text file is several pieces, and the last one has `ends`."""

    name: str
    text: str
    ends: bool


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be read. where: file:line (or the file); why: a phrase."""

    where: str
    why: str
    fatal: bool = True
    """False for a file found in a folder that turned out not to be text: always skipped and named."""

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


Unit = list[Span]


def read_units(files: list[SourceFile], unit_bytes: int = UNIT_BYTES) -> Iterator[Unit]:
    """Divide the files into units, in order and independently of the number of workers.

    Raises PrepareError for a compressed file that is damaged.
    """
    unit: Unit = []
    size = 0
    for file in files:
        for span in _compressed_spans(file, unit_bytes) if file.compression else _plain_spans(file, unit_bytes):
            unit.append(span)
            size += span.end - span.begin
            if size >= unit_bytes:
                yield unit
                unit, size = [], 0
    if unit:
        yield unit


def sample_units(files: list[SourceFile], sample_bytes: int, max_bytes: int | None) -> Iterator[Unit]:
    """Units of about `sample_bytes` of text in all, spread evenly over the first `max_bytes` of the files.

    Of a compressed file the beginning is taken: the rest cannot be read without decompressing everything before it.
    """
    total = sum(file.size for file in files)
    total = min(total, max_bytes or total)
    share = min(1.0, sample_bytes / max(total, 1))
    credit, seen = 0.0, 0
    for file in files:
        if seen >= total:
            return
        if file.compression:
            credit += file.size * share
            for span in _compressed_spans(file, UNIT_BYTES):
                if credit <= 0:
                    break
                yield [span]
                credit -= span.end - span.begin if share < 1 else 0
        else:
            for span in _plain_spans(file, UNIT_BYTES):
                credit += (span.end - span.begin) * share
                if credit >= span.end - span.begin:
                    yield [span]
                    credit -= span.end - span.begin
        seen += file.size


def _plain_spans(file: SourceFile, unit_bytes: int) -> Iterator[Span]:
    for begin in range(0, file.size, unit_bytes):
        end = min(begin + unit_bytes, file.size)
        yield Span(file, begin, end, last=end == file.size, first_line=1 if begin == 0 else None)


def open_compressed(file: SourceFile) -> io.BufferedReader:
    """The file's uncompressed bytes. Raises PrepareError if it cannot be opened."""
    try:
        raw = gzip.GzipFile(file.path) if file.compression == "gz" else _ZstReader(file.path)
    except OSError as error:
        raise PrepareError(f"{file.path}: {error.strerror or error}") from error
    return io.BufferedReader(cast(io.RawIOBase, raw), 1 << 20)


class _ZstReader(io.RawIOBase):
    """Uncompressed bytes of a .zst file of one or more frames.

    zstandard's own stream_reader treats a truncated file as complete; here it is an EOFError, as in gzip.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed in close()
        self._frame = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._file.read(1 << 17)
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._ready = memoryview(self._decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        parts = []
        while data:
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(self._frame.decompress(data))
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        return b"".join(parts)

    def close(self) -> None:
        self._file.close()
        super().close()


def _compressed_spans(file: SourceFile, unit_bytes: int) -> Iterator[Span]:
    offset, line = 0, 1
    with open_compressed(file) as stream:
        while True:
            try:
                data = stream.read(unit_bytes)
                data += stream.readline() if data else b""
                # Empty at the end of the file.
                following = stream.peek(1) if data else b""
            except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
                raise PrepareError(f"{file.path}: damaged {file.compression} file: {error}") from error
            if not data:
                return
            yield Span(file, offset, offset + len(data), last=not following, data=data, first_line=line)
            offset += len(data)
            line += data.count(b"\n")


def read_pieces(span: Span, text_key: str) -> Iterator[DocumentPiece | BadRecord]:
    """Yield the documents of a span and its unreadable records."""
    try:
        data, offset = (span.data, span.begin) if span.data is not None else _read_range(span)
    except OSError as error:
        yield BadRecord(span.file.path, error.strerror or str(error))
        return
    if span.file.kind == "jsonl":
        yield from _json_lines(span, data, offset, text_key)
        return
    fault = "not text: it holds a NUL byte" if b"\0" in data else None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text = ""
        fault = fault or f"not UTF-8: {error.reason} at byte {offset + error.start}"
        position = error.start
    else:
        position = data.find(b"\0")
    if fault:
        line = _first_line(span, offset) + data.count(b"\n", 0, position)
        yield BadRecord(f"{span.file.path}:{line}", fault, fatal=not span.file.from_folder)
    elif text or span.last:
        yield DocumentPiece(span.file.name, text, ends=span.last)


def _read_range(span: Span) -> tuple[bytes, int]:
    """Return the lines that begin within the range, and the offset of the first of them."""
    with open(span.file.path, "rb") as stream:
        begin = span.begin
        if begin:
            # The byte before may be the line break.
            stream.seek(begin - 1)
            begin += len(stream.readline()) - 1
        if begin >= span.end:
            return b"", begin
        data = stream.read(span.end - begin)
        if not data.endswith(b"\n"):
            data += stream.readline()
        return data, begin


def _first_line(span: Span, offset: int) -> int:
    """Number of the line that begins at `offset`. Slow (it reads all text before it), so for bad records only."""
    if span.first_line is not None:
        return span.first_line
    line = 1
    with open(span.file.path, "rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 20))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _json_lines(span: Span, data: bytes, offset: int, text_key: str) -> Iterator[DocumentPiece | BadRecord]:
    begin = offset
    first_line: int | None = None
    for index, line in enumerate(data.split(b"\n")):  # not splitlines(): only \n separates records
        if line.strip():
            text, fault = _extract_text(line, text_key)
            if fault:
                first_line = first_line or _first_line(span, begin)
                yield BadRecord(f"{span.file.path}:{first_line + index}", fault)
            elif text:
                # The byte offset is the same for a compressed file and for any division into units.
                yield DocumentPiece(f"{_plain_name(span.file)}@{offset}", text, ends=True)
        offset += len(line) + 1


def _plain_name(file: SourceFile) -> str:
    return file.name.removesuffix(f".{file.compression}") if file.compression else file.name


def _extract_text(line: bytes, text_key: str) -> tuple[str, str | None]:
    """Return (text, error); one of the two is empty."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: {error.reason} at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return "", f"not JSON: {error.msg} at column {error.colno}"
    if not isinstance(record, dict):
        return "", f"expected an object with the key '{text_key}', found {type(record).__name__}"
    if text_key not in record:
        keys = ", ".join(sorted(record)[:8]) or "none"
        return "", f"has no key '{text_key}' (keys: {keys}); name another with text_key"
    text = record[text_key]
    if not isinstance(text, str):
        return "", f"'{text_key}' is {type(text).__name__}, not a string"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "", f"'{text_key}' holds half of a surrogate pair, which is no text"
    return text, None
