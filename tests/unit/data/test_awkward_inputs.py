"""Inputs as the world has them: each is read exactly, or set aside by name; nothing else is lost or changed."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmtrain.data.sources import record_text, records
from llmtrain.data.sources.files import PassedOver, list_files
from llmtrain.data.sources.records import BadRecord, DocumentPiece, SetAside, Slice, read_slice, whole

TEXTS = [
    "first",
    "naïve 走\nof two lines",
    'a "quoted", one',
    "<|endoftext|> spelled out",
    "a\u2028b\x85c",
    "nul \0 in it",
]


def lines(texts: list[str] = TEXTS, key: str = "text", end: str = "\n") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}) + end for text in texts).encode()


def parquet(column: pa.Array, name: str = "text", twice: bool = False, **options) -> bytes:
    out = io.BytesIO()
    columns = [pa.array(range(len(column))), *[column] * (1 + twice)]
    table = pa.table(columns, names=["id", *[name] * (1 + twice)])
    pq.write_table(table, out, row_group_size=2, **options)
    return out.getvalue()


def arrow(texts: list, stream: bool) -> bytes:
    out, table = io.BytesIO(), pa.table({"text": texts})
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return out.getvalue()


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "text")
    return out.getvalue()


def csv_of(texts: list[str]) -> bytes:
    return (
        "id,text\r\n" + "".join('{},"{}"\r\n'.format(i, t.replace('"', '""')) for i, t in enumerate(texts))
    ).encode()


EXACT: dict[str, tuple[str, bytes, list[str]]] = {
    "JSON lines": ("a.jsonl", lines(), TEXTS),
    "JSON lines of another name": ("a.txt", lines(), TEXTS),
    "JSON lines without any name": ("part-00000", lines(), TEXTS),
    "JSON lines in .json.gz": ("a.json.gz", gzip.compress(lines()), TEXTS),
    "members of gzip, one after the other": (
        "a.gz",
        gzip.compress(lines(TEXTS[:2])) + gzip.compress(lines(TEXTS[2:])),
        TEXTS,
    ),
    "bzip2": ("a.jsonl.bz2", bz2.compress(lines()), TEXTS),
    "xz": ("a.jsonl.xz", lzma.compress(lines()), TEXTS),
    "frames of zstandard": (
        "a.zst",
        zstandard.compress(lines(TEXTS[:3])) + zstandard.compress(lines(TEXTS[3:])),
        TEXTS,
    ),
    "zstandard with frames without content": (
        "a.zst",
        b"P*M\x18\x02\0\0\0ab"
        + zstandard.compress(lines(TEXTS[:3]))
        + b"_*M\x18\0\0\0\0"
        + zstandard.compress(lines(TEXTS[3:])),
        TEXTS,
    ),
    "gzip under a wrong name": ("a.jsonl", gzip.compress(lines()), TEXTS),
    "Windows' line ends": ("a.jsonl", lines(end="\r\n"), TEXTS),
    "blank lines and no line end": ("a.jsonl", (b"\n\n" + lines().replace(b"\n", b"\n \n")).rstrip(), TEXTS),
    "a byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(), TEXTS),
    "a long line": ("a.jsonl", lines(["short", "x" * 3_000_000, "last"]), ["short", "x" * 3_000_000, "last"]),
    "a field of a field": ("a.jsonl", b'{"text": "no", "doc": {"body": "yes"}}\n', ["yes"]),
    "an array of JSON": ("a.json", json.dumps([{"text": text} for text in TEXTS]).encode(), TEXTS),
    "an indented array of JSON": (
        "a.json",
        json.dumps([{"text": t, "l": [{}]} for t in TEXTS], indent=2).encode(),
        TEXTS,
    ),
    "an indented object": ("a.json", json.dumps({"text": TEXTS[1]}, indent=2).encode(), TEXTS[1:2]),
    "CSV with quoted line breaks": ("a.csv", csv_of(TEXTS), TEXTS),
    "Parquet": ("a.parquet", parquet(pa.array(TEXTS)), TEXTS),
    "Parquet of another name and type": (
        "a.txt",
        parquet(pa.array(TEXTS, pa.large_string()), compression="zstd"),
        TEXTS,
    ),
    "Parquet with a dictionary": ("a.parquet", parquet(pa.array(TEXTS).dictionary_encode()), TEXTS),
    "Parquet with nested text": ("a.parquet", parquet(pa.array([{"body": t} for t in TEXTS]), "doc"), TEXTS),
    "Parquet of bytes": ("a.parquet", parquet(pa.array([text.encode() for text in TEXTS])), TEXTS),
    "an Arrow file": ("a.arrow", arrow(TEXTS, stream=False), TEXTS),
    "an Arrow stream": ("a.arrow", arrow(TEXTS, stream=True), TEXTS),
    "text with Windows' line ends": ("a.txt", b"one\r\ntwo\r", ["one\r\ntwo\r"]),
    "text with a byte order mark": ("a.txt", "\ufefftext".encode(), ["text"]),
    "compressed text": ("a.txt.xz", lzma.compress("naïve\n走".encode()), ["naïve\n走"]),
    "an empty file": ("a.txt", b"", []),
    "an empty compressed file": ("a.jsonl.gz", gzip.compress(b""), []),
    "settings in JSON among text": ("folder/a.json", b'{"name": "llmtrain"}', ['{"name": "llmtrain"}']),
}

ASIDE: dict[str, tuple[str, bytes, str]] = {
    "UTF-16": ("a.txt", "text".encode("utf-16"), "a.txt: UTF-16, not UTF-8; `iconv -f UTF-16 -t UTF-8`"),
    "UTF-16 without a mark": ("a.txt", "text".encode("utf-16-le"), "a.txt:1: not text: it holds a NUL byte"),
    "a NUL in a text": ("a.txt", b"one\ntw\0o", "a.txt:2: not text: it holds a NUL byte"),
    "Latin-1": ("a.txt", b"one\nna\xefve", "a.txt:2: not UTF-8: invalid continuation byte at byte 6"),
    "a JSON array that is cut short": (
        "a.json",
        b'[{"text": "a"},',
        "a.json: not JSON: its brackets do not close behind record 1",
    ),
    "gzip that is cut short": (
        "a.jsonl.gz",
        gzip.compress(lines())[:-9],
        "a.jsonl.gz: damaged gz file: Compressed file ended",
    ),
    "gzip with a flipped bit": (
        "a.txt.gz",
        gzip.compress(b"text")[:-8] + b"\0" * 8,
        "damaged gz file: CRC check failed",
    ),
    "zstandard that is cut short": (
        "a.zst",
        zstandard.compress(lines())[:-5],
        "a.zst: damaged zst file: it ends in the middle",
    ),
    "zstandard that is cut within its first bytes": (
        "a.zst",
        zstandard.compress(lines())[:3],
        "a.zst: damaged zst file: it ends after 3 bytes",
    ),
    "an empty .gz, which gzip cannot read either": ("a.jsonl.gz", b"", "a.jsonl.gz: damaged gz file: it ends after 0"),
    "an empty Parquet file": ("a.parquet", b"", "a.parquet: damaged parquet file: it is empty"),
    "gzip twice": ("a.jsonl.gz", gzip.compress(gzip.compress(lines())), "not text: gz within gz; decompress it once"),
    "xz that is cut short": ("a.xz", lzma.compress(lines())[:-5], "a.xz: damaged xz file"),
    "bzip2 that is cut short": ("a.bz2", bz2.compress(lines())[:-5], "a.bz2: damaged bz2 file"),
    "a ZIP archive": ("a.txt", zipped(), "a.txt: not text: a ZIP archive"),
    "a tar archive": ("a.tar.gz", gzip.compress(tar()), "a.tar.gz: not text: a tar archive"),
    "CSV without the column": (
        "a.csv",
        b"id,body\n1,x\n",
        "a.csv: it has no column 'text' (columns: id, body); name another",
    ),
    "CSV with an open quote": ("a.csv", b'text\n"a\n', "a.csv: not CSV: unexpected end of data at line"),
    "Parquet without the column": (
        "a.parquet",
        parquet(pa.array(TEXTS), "body"),
        "a.parquet: it has no column 'text' (columns: id, body)",
    ),
    "Parquet of numbers": ("a.parquet", parquet(pa.array([1, 2])), "a.parquet: column 'text' is int64, not text"),
    "Parquet with text in structs": (
        "a.parquet",
        parquet(pa.array([{"b": "x"}])),
        "a.parquet: column 'text' is struct<b: string>, not text",
    ),
    "Parquet with lists of texts": (
        "a.parquet",
        parquet(pa.array([["x", "y"]])),
        "a.parquet: column 'text' is list<element: string>, not text",
    ),
    "Arrow with lists of texts": (
        "a.arrow",
        arrow([["x", "y"]], stream=True),
        "a.arrow: column 'text' is list<item: string>, not text",
    ),
    "Parquet with two columns of the name": (
        "a.parquet",
        parquet(pa.array(TEXTS), twice=True),
        "a.parquet: it has 2 columns 'text' (columns: id, text, text); name another",
    ),
    "Parquet that is cut short": ("a.parquet", parquet(pa.array(TEXTS))[:-50], "a.parquet: damaged parquet file"),
    "an array of JSON that is cut short": ("a.json", b'[{"text": "a"}, {"te', "a.json: not JSON: "),
    "an Arrow stream that is cut short": ("a.arrow", arrow(TEXTS, stream=True)[:-100], "a.arrow: damaged arrow file"),
}

BAD_RECORDS: dict[str, tuple[str, bytes, str]] = {
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:2: 'text' holds half of a surrogate pair"),
    "deep nesting": ("a.jsonl", b"[" * 100_000, "a.jsonl:2: not JSON that is read here: nested too deeply"),
    "a number of many digits": (
        "a.jsonl",
        b'{"n": ' + b"1" * 5000 + b"}",
        "a.jsonl:2: not JSON that is read here: Exceeds",
    ),
    "no text": ("a.jsonl", b'{"text": null}', "a.jsonl:2: 'text' is null, not a string"),
    "another key": (
        "a.jsonl",
        b'{"body": "x"}',
        "a.jsonl:2: has no key 'text' (keys: body); name another with text_key",
    ),
}


def read(path: Path, text_key: str = "text") -> tuple[list[str], list[BadRecord]]:
    """Texts and what could not be read, of a file or a folder."""
    texts, bad = [], []
    for file in list_files([str(path)]):
        try:
            items = list(read_slice(whole(file), text_key))
        except SetAside as error:
            items = [error.bad]
        texts += [item.text for item in items if not isinstance(item, BadRecord)]
        bad += [item for item in items if isinstance(item, BadRecord)]
    return texts, bad


@pytest.fixture
def write(tmp_path) -> Callable[[str, bytes], Path]:
    def make(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path.parent if "/" in name else path

    return make


@pytest.mark.parametrize("case", EXACT)
def test_read_exactly(write, case):
    name, content, expected = EXACT[case]
    key = {"a field of a field": "doc.body", "Parquet with nested text": "doc.body"}.get(case, "text")
    assert read(write(name, content), key) == (expected, [])


@pytest.mark.parametrize("case", ASIDE)
def test_set_aside_by_name(write, case):
    name, content, said = ASIDE[case]
    texts, [bad] = read(write(name, content))
    assert texts == [] and bad.fatal and bad.nbytes == len(content)
    assert said in str(bad)


@pytest.mark.parametrize("character", ["x", "é", "走"])
def test_a_text_without_line_breaks_is_whole_whatever_its_length(write, monkeypatch, character):
    monkeypatch.setattr(records, "BLOCK_BYTES", 64)
    monkeypatch.setattr(records, "LONGEST_LINE", 256)
    for length in range(200, 420):
        [file] = list_files([str(write("a.txt", (character * length).encode()))])
        for step in (file.size, 100):
            slices = [Slice(file, begin, min(begin + step, file.size)) for begin in range(0, file.size, step)]
            pieces = [piece for part in slices for piece in read_slice(part, "text")]
            assert "".join(piece.text for piece in pieces if isinstance(piece, DocumentPiece)) == character * length
            assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "folder/a.jsonl"])
@pytest.mark.parametrize("line", [b"\0" * 5000, b'{"text": "' + b"x" * 5000 + b'"}'], ids=["zeros", "a record"])
def test_a_line_beyond_all_bounds_sets_its_file_aside(write, monkeypatch, name, line):
    monkeypatch.setattr(records, "LONGEST_RECORD", 1 << 10)
    monkeypatch.setattr(records, "BLOCK_BYTES", 64)
    content = b'{"text": "before"}\n{"text": "too"}\n' * 5 + line + b'\n{"text": "behind"}\n'
    texts, [bad] = read(write(name, gzip.compress(content) if name.endswith("gz") else content))
    assert "behind" not in texts and bad.fatal == ("folder" not in name)
    assert "a.jsonl" in str(bad) and ":11: a line of more than" in str(bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_line_of_100_mb_is_read_exactly_in_little_memory(write, name):
    line = "naïve 走 fox " * 7_000_000
    content = lines(["before", line, "behind"]) if name == "a.jsonl" else f"before\n{line}\nbehind".encode()
    path = write(name, content)
    size = len(line.encode())
    assert size > 100 << 20
    tracemalloc.start()
    found = hashlib.blake2b()
    [file] = list_files([str(path)])
    for item in read_slice(whole(file), "text"):
        assert isinstance(item, DocumentPiece)
        found.update(item.text.encode())
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = f"before{line}behind" if name == "a.jsonl" else f"before\n{line}\nbehind"
    assert found.hexdigest() == hashlib.blake2b(expected.encode()).hexdigest()
    assert memory < (8 * size if name == "a.jsonl" else size)


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_a_bad_record_is_set_aside_alone(write, case):
    name, content, said = BAD_RECORDS[case]
    texts, [bad] = read(write(name, b'{"text": "before"}\n' + content + b'\n{"text": "behind"}\n'))
    assert texts == ["before", "behind"]
    assert said in str(bad)


def test_rows_of_tables_are_set_aside_alone(write):
    assert read(write("a.parquet", parquet(pa.array(["a", None, "c"]))))[0] == ["a", "c"]
    texts, [bad] = read(write("a.csv", b"text,id\na,1\nb\nc,3\n"))
    assert texts == ["a", "c"] and str(bad).endswith("a.csv: record 2: it has 1 columns, the first row 2")


@pytest.mark.parametrize("name", ["a.csv", "folder/a.csv", "folder/a.tsv.gz"])
def test_a_table_without_the_column_is_an_error_in_a_folder_too(write, name):
    between = "\t" if "tsv" in name else ","
    content = f"id{between}body\n1{between}x\n".encode()
    texts, [bad] = read(write(name, gzip.compress(content) if name.endswith("gz") else content))
    assert texts == [] and bad.fatal
    assert "it has no column 'text' (columns: id, body); name another with text_key" in str(bad)


def test_the_row_groups_of_slices_are_those_of_the_file(write, monkeypatch):
    path = write("a.parquet", parquet(pa.array([f"row {i}" for i in range(40)])))
    [file] = list_files([str(path)])
    pieces = [
        piece
        for begin in range(0, file.size, 700)
        for piece in read_slice(type(whole(file))(file, begin, min(begin + 700, file.size)), "text")
    ]
    assert pieces == list(read_slice(whole(file), "text"))
    assert [piece.name for piece in pieces] == [f"a.parquet@{row}" for row in range(40)]  # pyright: ignore[reportAttributeAccessIssue]


def test_a_folder_reads_records_of_any_name_and_counts_what_it_passes_over(write, tmp_path):
    write("folder/part-00000", lines(TEXTS[:1]))
    write("folder/photo.png", b"\x89PNG\r\n")
    write("folder/notes.doc", b"notes")
    write("folder/rows.parquet", parquet(pa.array(TEXTS[1:2])))
    (tmp_path / "folder" / "gone.txt").symlink_to("nowhere")
    left_out = PassedOver()
    assert [file.name for file in list_files([str(tmp_path / "folder")], left_out)] == ["part-00000", "rows.parquet"]
    assert left_out.lines() == [
        "1 no regular files: gone.txt",
        "1 of another kind (.doc): notes.doc",
        "1 of another kind (.png): photo.png",
    ]


def test_a_saved_data_set_is_its_rows(tmp_path):
    from datasets import Dataset, DatasetDict

    made = {name: Dataset.from_dict({"text": [f"{name} {text}" for text in TEXTS]}) for name in ("train", "test")}
    made["test"].save_to_disk(str(tmp_path / "one"))
    DatasetDict(made).save_to_disk(str(tmp_path / "both"))  # type: ignore[arg-type]
    assert read(tmp_path / "one") == ([f"test {text}" for text in TEXTS], [])
    assert read(tmp_path / "both") == ([f"train {text}" for text in TEXTS], [])
    left_out = PassedOver()
    list_files([str(tmp_path / "both")], left_out)
    assert "1 other splits of a saved data set (name one to read it): test" in left_out.lines()


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "\\ud83d\\ude00 pair"}',
        '{"text": "\\ud83d half"}',
        '{"text": NaN}',
        '{"id": 123456789012345678901234567890, "text": "long number"}',
        '{"id": 1e999, "text": "huge"}',
        '{"text": "one", "text": "two"}',
        '{"text": "tab\\t \\u0000 \\/ \u2028"}',
        '"only text"',
        '{"text": 5}',
        '{"text": "a"} x',
        "[" * 5000,
        '{"text": "raw \t tab"}',
        "\ufeff{}",
    ],
)
def test_lines_are_read_alike_with_and_without_orjson(line, monkeypatch):
    pytest.importorskip("orjson")
    fast = record_text.parse_line(line.encode(), "text")
    monkeypatch.setattr(record_text, "orjson", None)
    assert record_text.parse_line(line.encode(), "text") == fast
