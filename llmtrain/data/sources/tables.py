"""Records of Parquet, Arrow, CSV and JSON values. pyarrow is imported where it is needed.

Each reader yields (row, value): the number of the row in the file, from 0, and its text (str or bytes, None where there is none),
or the whole record, a mapping. A damaged file raises one of compression.DAMAGES; one without the column, NoSuchColumn.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from llmtrain.data.sources.formats import NoSuchColumn, delimiter, plain_name
from llmtrain.data.sources.record_text import RecordKey
from llmtrain.errors import first_line


class Fault(str):
    """The reason why a row has no text."""


Rows = Iterator[tuple[int, Any]]
_BATCH_ROWS = 128
_READ_CHARACTERS = 1 << 20
_NEAR_THE_END = 64
"""Characters before the end of what was read so far, within which a syntax error may only mean that more is to come."""


def _parquet(stream: BinaryIO, begin: int, end: int, text_key: str, name: str) -> Rows:
    """The row groups whose first page lies in [begin, end)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _damage(pa):
        file = pq.ParquetFile(stream, buffer_size=1 << 20)
        path = _column(file.schema_arrow, text_key)
        row = 0
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            first = about.column(0)
            at = first.dictionary_page_offset or first.data_page_offset
            if begin <= at < end:
                number = row
                columns = [text_key] if path else None
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    for value in _values(batch, path):
                        yield number, value
                        number += 1
            row += about.num_rows


def _arrow(stream: BinaryIO, begin: int, end: int, text_key: str, name: str) -> Rows:
    import pyarrow as pa

    with _damage(pa):
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        if is_file:
            file = pa.ipc.open_file(stream)
            batches, schema = (file.get_batch(index) for index in range(file.num_record_batches)), file.schema
        else:
            batches = pa.ipc.open_stream(stream)
            schema = batches.schema
        path, row = _column(schema, text_key), 0
        for batch in batches:
            for value in _values(batch, path):
                yield row, value
                row += 1


@contextmanager
def _damage(pa: Any) -> Iterator[None]:
    """Arrow's errors as OSError, which stands for a file that cannot be read."""
    try:
        yield
    except pa.ArrowException as error:
        raise OSError(first_line(error)) from error


def _column(schema: Any, text_key: str) -> list[str]:
    """The names that lead to a column: one, or those of structs and a field of them; none for whole records.

    Raises NoSuchColumn.
    """
    if isinstance(text_key, RecordKey):
        return []
    path = [text_key] if text_key in schema.names else text_key.split(".")
    fields, above, kind = list(schema), None, None
    for name in path:
        found = [field.type for field in fields if field.name == name]
        if len(found) != 1 and kind is None:
            has, columns = f"{len(found)} columns" if found else "no column", ", ".join(schema.names[:8])
            raise NoSuchColumn(f"it has {has} '{text_key}' (columns: {columns}); name another with text_key")
        if len(found) != 1:
            raise NoSuchColumn(f"column '{above}' is {kind}, without one field '{name}'; name another with text_key")
        [kind], above = found, name if above is None else f"{above}.{name}"
        fields = [kind.field(index) for index in range(kind.num_fields)] if str(kind).startswith("struct") else []
    text = str(kind)
    if not any(part in text for part in ("string", "binary")) or "list" in text or "struct" in text or "map" in text:
        raise NoSuchColumn(f"column '{text_key}' is {text}, not text; name another with text_key")
    return path


def _values(batch: Any, path: list[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not path:
        yield from batch.to_pylist()
        return
    column = batch.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, name)  # pyright: ignore[reportAttributeAccessIssue]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for value in column.cast(pa.large_binary()):
        yield value.as_py()


def _csv(stream: BinaryIO, begin: int, end: int, text_key: str, name: str) -> Rows:
    csv.field_size_limit(sys.maxsize)
    extension = os.path.splitext(plain_name(name))[1].lower()
    lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    rows = csv.reader(lines, delimiter=delimiter(extension), strict=True)
    try:
        columns = next(rows, [])
        whole = isinstance(text_key, RecordKey)
        if text_key not in columns and not whole:
            found = ", ".join(columns[:8])
            raise NoSuchColumn(f"it has no column '{text_key}' (columns: {found}); name another with text_key")
        at = 0 if whole else columns.index(text_key)
        for row, values in enumerate(rows):
            if len(values) == len(columns):
                yield row, dict(zip(columns, values, strict=True)) if whole else values[at]
            elif values:
                yield row, Fault(f"it has {len(values)} columns, the first row {len(columns)}")
    except UnicodeDecodeError as error:
        raise OSError(f"not UTF-8: {error.reason} near line {rows.line_num}") from error
    except csv.Error as error:
        raise OSError(f"not CSV: {error} at line {rows.line_num}") from error
    finally:
        lines.detach()


def _json(stream: BinaryIO, begin: int, end: int, text_key: str, name: str) -> Rows:
    """Objects that follow one another, or that are in arrays, over any number of lines."""
    decoder, lines = json.JSONDecoder(), io.TextIOWrapper(stream, "utf-8-sig", newline="")
    text, at, row, ended, wanted, depth = "", 0, 0, False, _READ_CHARACTERS, 0
    try:
        while True:
            while at < len(text) and text[at] in " \t\r\n,[]":  # an array's own characters: its values are records
                depth += (text[at] == "[") - (text[at] == "]")
                at += 1
            if at == len(text) and ended:
                if depth:
                    raise OSError(f"not JSON: its brackets do not close behind record {row}")
                return
            try:
                value, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError as error:
                inside = error.pos < len(text) - _NEAR_THE_END and not error.msg.startswith("Unterminated string")
                if ended or inside:
                    raise OSError(f"not JSON: {error.msg.removesuffix(' at')} in record {row + 1}") from error
                more = lines.read(wanted)
                text, at, ended = text[at:] + more, 0, not more
                wanted = max(_READ_CHARACTERS, len(text))  # so that a long value is not begun again too often
                continue
            except (RecursionError, ValueError) as error:
                raise OSError(f"not JSON that is read here: {error} in record {row + 1}") from error
            yield row, value
            row += 1
    except UnicodeDecodeError as error:
        raise OSError(f"not UTF-8: {error.reason}") from error
    finally:
        lines.detach()


READERS: dict[str, Callable[[BinaryIO, int, int, str, str], Rows]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
    "json": _json,
}
