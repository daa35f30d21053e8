from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data import records as module
from llmtrain.data.records import BadRecord, read_pieces, read_units, sample_units
from llmtrain.data.source_files import PrepareError, classify, list_files


def pieces_of(files, unit_bytes: int = 1 << 20) -> list[Any]:  # of DocumentPiece and BadRecord
    return [piece for unit in read_units(files, unit_bytes) for span in unit for piece in read_pieces(span, "text")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", ("text", None, True)),
        ("A.PY", ("text", None, True)),
        ("a.jsonl", ("jsonl", None, True)),
        ("a.jsonl.zst", ("jsonl", "zst", True)),
        ("a.md.gz", ("text", "gz", True)),
        ("Makefile", ("text", None, True)),
        ("a.png", ("text", None, False)),
        ("a.tar.gz", ("text", "gz", False)),
    ],
)
def test_files_are_told_apart_by_name(name, expected):
    assert classify(name) == expected


def test_a_folder_gives_its_text_by_name_without_hidden_and_cached_files(tmp_path):
    for name in (
        "b/z.py",
        "a.md",
        "B.txt",
        "x.bin",
        ".git/config.txt",
        "__pycache__/m.py",
        "node_modules/n.js",
        ".env.txt",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    assert [file.name for file in list_files([str(tmp_path)])] == ["B.txt", "a.md", "b/z.py"]


def test_every_missing_source_is_named_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrepareError) as error:
        list_files([str(tmp_path / "no1"), str(tmp_path / "empty"), "stdlib", str(tmp_path / "no2")])
    assert all(name in str(error.value) for name in ("no1: No such file", "empty: holds no text", "no2: No such file"))


def test_stdlib_is_python_sources_without_tests():
    files = list_files(["stdlib"])
    names = [file.name for file in files]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert names == sorted(names) and names == [file.name for file in list_files(["stdlib"])]
    assert {"ast.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert all((root / name).is_file() and name.endswith(".py") for name in names)
    assert not any(set(name.split("/")) & {"test", "tests", "site-packages"} for name in names)
    assert 5e6 < sum(file.size for file in files) < 30e6


def test_every_stdlib_file_is_readable_text():
    items = pieces_of(list_files(["stdlib"]))
    assert [item for item in items if isinstance(item, BadRecord)] == []


@pytest.mark.parametrize("unit_bytes", [1, 7, 64, 1000, 1 << 20])
def test_records_do_not_depend_on_how_the_file_is_cut(tmp_path, unit_bytes):
    texts = [f"record {i} " + "é" * (i % 40) for i in range(60)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(lines[:30]) + "\n\n" + "\n".join(lines[30:]), encoding="utf-8")
    found = pieces_of(list_files([str(file)]), unit_bytes)
    assert [piece.text for piece in found] == texts
    assert [piece.name for piece in found] == [piece.name for piece in pieces_of(list_files([str(file)]))]
    assert len({piece.name for piece in found}) == 60


@pytest.mark.parametrize("unit_bytes", [3, 50, 1 << 20])
@pytest.mark.parametrize(
    "text", ["one\ntwo\n\nthree é\n", "no newline at the end\nlast", "one line", "\n\n\n", "a\r\nb\r\n"]
)
def test_pieces_of_a_text_join_to_the_text_and_only_the_last_ends_it(tmp_path, text, unit_bytes):
    file = tmp_path / "t.txt"
    file.write_bytes(text.encode())
    found = pieces_of(list_files([str(file)]), unit_bytes)
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]


def test_empty_files_and_records_are_no_documents(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n\n')
    assert pieces_of(list_files([str(tmp_path)])) == []


def test_binary_files_are_bad_records_fatal_only_when_named(tmp_path):
    file = tmp_path / "x.txt"
    file.write_bytes(b"line\n\0\0")
    [named] = pieces_of(list_files([str(file)]))
    [found] = pieces_of(list_files([str(tmp_path)]))
    assert str(named) == f"{file}:2: not text: it holds a NUL byte" == str(found)
    assert (named.fatal, found.fatal) == (True, False)


def test_a_sample_is_spread_over_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 1000)
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("x" * 999 + "\n" + "y" * 999 + "\n")
    files = list_files([str(tmp_path)])
    spans = [span for unit in sample_units(files, 5000, None) for span in unit]
    assert sum(span.end - span.begin for span in spans) == 5000
    assert len({span.file.name for span in spans}) == 5
    assert len(list(sample_units(files, 10**9, None))) == 20
    assert {span.file.name for unit in sample_units(files, 10**9, 4000) for span in unit} == {"0.txt", "1.txt"}
