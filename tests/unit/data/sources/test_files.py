import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.sources import records as records_module
from llmtrain.data.sources import sample as source_sample
from llmtrain.data.sources.files import PassedOver, PrepareError, list_files, named_twice
from llmtrain.data.sources.records import BadRecord, SetAside, Slice, read_slice, whole
from llmtrain.data.sources.sample import sample_slices


def pieces_of(files, slice_bytes: int = 1 << 40) -> list[Any]:  # of DocumentPiece and BadRecord
    """Read each file in slices of so many bytes."""
    found: list[Any] = []
    for file in files:
        for begin in range(0, file.size, slice_bytes):
            try:
                found += read_slice(Slice(file, begin, min(begin + slice_bytes, file.size)), "text")
            except SetAside as error:
                found.append(error.bad)
    return found


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
    left_out = PassedOver()
    assert [file.name for file in list_files([str(tmp_path)], left_out)] == ["B.txt", "a.md", "b/z.py"]
    assert left_out.lines() == [
        "3 hidden or generated folders: .git, __pycache__, node_modules",
        "1 hidden: .env.txt",
        "1 of another kind (.bin): x.bin",
    ]


def test_links_to_folders_are_named_and_not_followed(tmp_path):
    (tmp_path / "texts/deep").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("texts/deep/a.txt", "elsewhere/b.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "texts/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "texts/deep/up").symlink_to(tmp_path / "texts")
    left_out = PassedOver()
    assert [file.name for file in list_files([str(tmp_path / "texts")], left_out)] == ["deep/a.txt"]
    assert left_out.lines() == ["2 links to folders (name one to read it): link, deep/up"]


def test_what_prepare_made_is_no_source(tmp_path):
    """Its tokenizer and its records are files of JSON; a killed `prepare texts --out texts/data` leaves data.partial."""
    (tmp_path / "a.txt").write_text("x")
    for folder in ("data", "killed.partial"):
        for name in ("tokenizer/tokenizer.json", "partitions/ab.json", "train/index.json"):
            (tmp_path / folder / name).parent.mkdir(parents=True)
            (tmp_path / folder / name).write_text("{}")
    (tmp_path / "data/manifest.json").write_text("{}")
    left_out = PassedOver()
    assert [file.name for file in list_files([str(tmp_path)], left_out)] == ["a.txt"]
    assert left_out.lines() == ["2 made by `llmtrain prepare`: data, killed.partial"]
    with pytest.raises(PrepareError, match="data: was made by `llmtrain prepare`: name its sources"):
        list_files([str(tmp_path / "data")])


def test_every_missing_source_is_named_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrepareError) as error:
        list_files([str(tmp_path / name) for name in ("no1", "empty", "*.gz", "no2")] + ["stdlib"])
    said = ("no1: No such file", "empty: holds no text", "*.gz: matches no file", "no2: No such file")
    assert all(name in str(error.value) for name in said)


def test_files_of_several_sources_are_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / "texts" / name).write_text("x")
    files = list_files(["texts", str(tmp_path / "texts/b.txt"), "texts/../texts/*.txt"])
    assert [Path(path).name for path in named_twice(files)] == ["a.txt", "b.txt", "c.txt"]
    assert [Path(path).name for path in named_twice(files[:4])] == ["b.txt"] and named_twice(files[:3]) == []


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


@pytest.mark.parametrize("slice_bytes", [1, 7, 64, 1000, 1 << 20])
def test_records_do_not_depend_on_how_the_file_is_cut(tmp_path, slice_bytes):
    texts = [f"record {i} " + "é" * (i % 40) for i in range(60)]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(lines[:30]) + "\n\n" + "\n".join(lines[30:]), encoding="utf-8")
    found = pieces_of(list_files([str(file)]), slice_bytes)
    assert [piece.text for piece in found] == texts
    assert [piece.name for piece in found] == [piece.name for piece in pieces_of(list_files([str(file)]))]
    assert len({piece.name for piece in found}) == 60


@pytest.mark.parametrize("slice_bytes", [1, 50, 1000])
def test_a_bad_line_has_its_number_however_the_file_is_cut(tmp_path, slice_bytes):
    file = tmp_path / "r.jsonl"
    file.write_text("".join('{"text": "a"}\n' if line != 122 else "oops\n" for line in range(200)))
    bad = [piece for piece in pieces_of(list_files([str(file)]), slice_bytes) if isinstance(piece, BadRecord)]
    assert [str(record) for record in bad] == [f"{file}:123: not JSON: Expecting value at column 1"]


@pytest.mark.parametrize("slice_bytes", [3, 50, 1 << 20])
@pytest.mark.parametrize("block_bytes", [4, 1 << 20])
@pytest.mark.parametrize(
    "text", ["one\ntwo\n\nthree é\n", "no newline at the end\nlast", "one line", "\n\n\n", "a\r\nb\r\n"]
)
def test_pieces_of_a_text_join_to_the_text_and_only_the_last_ends_it(
    tmp_path, text, slice_bytes, block_bytes, monkeypatch
):
    monkeypatch.setattr(records_module, "BLOCK_BYTES", block_bytes)
    file = tmp_path / "t.txt"
    file.write_bytes(text.encode())
    found = pieces_of(list_files([str(file)]), slice_bytes)
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("slice_bytes", [30, 1000])
@pytest.mark.parametrize("character", ["a", "é", "走", "😀"])
def test_a_line_without_end_is_cut_between_two_characters(tmp_path, character, slice_bytes, monkeypatch):
    monkeypatch.setattr(records_module, "BLOCK_BYTES", 8)
    monkeypatch.setattr(records_module, "LONGEST_LINE", 11)
    text = "begin\n" + character * 40 + "\nend"
    (tmp_path / "t.txt").write_text(text)
    found = pieces_of(list_files([str(tmp_path / "t.txt")]), slice_bytes)
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(len(piece.text.encode()) for piece in found) <= 8 + 11


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


def test_a_glob_names_files_from_its_last_fixed_folder(tmp_path):
    for name in ("a/1.jsonl", "a/2.txt", "b/deep/3.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [file.name for file in list_files([f"{tmp_path}/**/*.jsonl"])] == ["a/1.jsonl", "b/deep/3.jsonl"]
    assert [file.name for file in list_files([f"{tmp_path}/?"])] == ["a/1.jsonl", "a/2.txt", "b/deep/3.jsonl"]


def test_a_sample_is_spread_over_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(source_sample, "SAMPLE_SLICE_BYTES", 1000)
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text("x" * 999 + "\n" + "y" * 999 + "\n")
    files = list_files([str(tmp_path)])
    slices = [part for part, _ in sample_slices(files, 5000, None, "text")]
    assert sum(part.end - part.begin for part in slices) == 5000
    assert len({part.file.name for part in slices}) == 5
    assert [part for part, _ in sample_slices(files, 10**9, None, "text")] == [whole(file) for file in files]
    assert {part.file.name for part, _ in sample_slices(files, 10**9, 4000, "text")} == {"0.txt", "1.txt"}


def test_a_table_in_a_sample_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(source_sample, "SAMPLE_SLICE_BYTES", 1000)
    (tmp_path / "a.csv").write_text("body\n" + "x\n" * 5000)
    [file] = list_files([str(tmp_path)])
    assert [part for part, _ in sample_slices([file], 5000, None, "body")] == [whole(file)]
