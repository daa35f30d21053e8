"""Shards of others: an index cannot run code, nor reach outside of its folder, nor hang what reads it."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from llmtrain.data.shards import index as shard_index
from llmtrain.data.shards import table
from llmtrain.data.shards.checks import check_streams
from llmtrain.data.shards.index import Index, ShardError, read_index
from llmtrain.data.shards.stored_stream import open_place
from llmtrain.data.shards.table import ShardTable
from llmtrain.schema.data import DataConfig
from tests.support.prepared import edit_index


@pytest.fixture
def folder(tmp_path, write_shards) -> Path:
    return write_shards(tmp_path / "shards", 20)


def test_an_index_of_streaming_dataset_is_read(folder):
    index = read_index(folder)
    assert index is not None and index.samples == 20 and index.hash_algorithm == "xxh64"


def test_a_merged_index_names_files_in_subfolders(folder):
    edit_index(folder, lambda shard: shard["raw_data"].update(basename="0/shard.00000.mds"))
    assert read_index(folder) is not None


def test_a_shard_that_is_named_twice_is_refused(folder):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"shards": [*index["shards"], index["shards"][0]]}))
    with pytest.raises(ShardError, match=r"names the shard shard\.00000\.mds 2 times"):
        read_index(folder)


@pytest.mark.parametrize("encoding", ["pkl", "pkl:", "list[pkl]", "exec"])
def test_a_column_that_is_not_plain_data_is_refused(folder, encoding):
    edit_index(folder, lambda shard: shard.update(column_encodings=[encoding]))
    with pytest.raises(ShardError, match=r"index.json .*shards\.\d+\.column_encodings\.0: .*(any code|no encoding)"):
        read_index(folder)


WRONG = {
    "column_encodings": [
        "float32:", "float16", "int", "uint16", "str", "json", "ndarray:float16:8", "ndarray:float32:4", "ndarray:uint16:2,4"
    ],
    "column_sizes": [8, 32, None],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_token_column_that_holds_no_tokens_is_refused(folder, key, value):
    """Before anything is read: what can be no tokens, and sizes that are not the encoding's."""
    edit_index(folder, lambda shard: shard.update({key: [value]}))
    streams = {"a": {"local": str(folder)}}
    data = DataConfig.model_validate({"seq_len": 8, "train": {"streams": streams}, "num_canonical_nodes": 1})
    [problem] = check_streams(data, 2)
    assert str(folder / "index.json") in problem.message and key in problem.message and "'tokens'" in problem.message


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("column_encodings", ["ndarray:int16:8"]),
        ("column_encodings", ["bytes"]),
        ("column_names", ["input_ids"]),
        (("column_encodings", "column_sizes"), (["ndarray:uint8:8"], [8])),
        (("column_encodings", "column_sizes"), (["ndarray:int64:2"], [16])),
        (
            ("column_names", "column_encodings", "column_sizes"),
            (["a", "tokens"], ["int64", "ndarray:uint16:4"], [8, 8]),
        ),
    ],
)
def test_an_index_that_contradicts_its_shards_is_refused(folder, key, values):
    """Each shard keeps its columns too; nothing that is read by others is trained on."""
    new = {key: values} if isinstance(key, str) else dict(zip(key, values, strict=True))
    edit_index(folder, lambda shard: shard.update(new))
    stream = open_place(str(folder))
    assert stream is not None
    with pytest.raises(ShardError, match=r"is damaged: its column_\w+ are .*; the index says"):
        stream.tokens(len(stream.index.shards) - 1)


NAMES = ["../x", "../../../x", "/tmp/x", "a/../../x", "", ".", "..", "a//b", "x\0y", "a/"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["raw_data", "zip_data"])
def test_a_name_that_leaves_the_folder_is_refused(folder, part, name):
    edit_index(folder, lambda shard: shard[part].update(basename=name))
    with pytest.raises(ShardError, match=rf"{part}\.basename: .* names no file inside of the folder"):
        read_index(folder)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": -1},
        {"samples": "20"},
        {"samples": True},
        {"format": "csv"},
        {"version": 1},
        {"raw_data": None},
        {"column_sizes": []},
        {"compression": None},
        {"hashes": ["sha1"]},
    ],
)
def test_what_is_no_index_is_refused(folder, wrong):
    edit_index(folder, lambda shard: shard.update(wrong))
    with pytest.raises(ShardError, match="is not the index of MDS shards"):
        read_index(folder)


def test_a_pipe_does_not_hang(folder):
    (folder / "index.json").unlink()
    os.mkfifo(folder / "index.json")
    with pytest.raises(ShardError, match="not a regular file"):
        read_index(folder)


def entry(name: str, hashes: list[str]) -> dict[str, Any]:
    return {"hashes": hashes, "samples": 1, "raw_data": {"basename": name, "bytes": 8}, "zip_data": None}


@pytest.mark.parametrize(
    ("hashes", "fastest"),
    [([["sha1", "xxh64"]], "xxh64"), ([["md5", "sha1"], ["sha1"]], "sha1"), ([["of-tomorrow", "shake_128"]], None)],
)
def test_the_fastest_hash_is_taken(tmp_path, hashes, fastest):
    content = ShardTable.build([entry(str(number), one) for number, one in enumerate(hashes)], "")
    assert Index(tmp_path, ShardTable(memoryview(content))).hash_algorithm == fastest


@pytest.mark.parametrize("space", ["", " \n\t"])
def test_an_index_is_read_entry_by_entry_as_json_reads_it(tmp_path, write_shards, space):
    folder = write_shards(tmp_path / "shards", 90)
    index = json.loads((folder / "index.json").read_text())
    shards = f"{space},{space}".join(json.dumps(shard, indent=1) for shard in index["shards"])
    text = f'{space}{{{space}"a":{space}[1, {{}}],"shards"{space}:{space}[{space}{shards}{space}]{space},"version": 2}}{space}'
    assert json.loads(text)["shards"] == index["shards"]
    (folder / "index.json").write_text(text)
    found = read_index(folder)
    assert found is not None and len(found.shards) == len(index["shards"]) > 1
    assert [*found.shards] == index["shards"]
    assert [raw for raw, _ in found.shards.names()] == [shard["raw_data"]["basename"] for shard in index["shards"]]
    assert found.shards[-1] == found.shards[len(index["shards"]) - 1]
    with pytest.raises(IndexError):
        found.shards[len(index["shards"])]


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", '{"shards": [', '{"shards": []} x', '{"shards": [],}', '{"shards": {}}', '{"a": 1}', "null"),
        *('{"shards": [1]}', '{"shards": [{}]}', '{"shards" []}', "{5: []}", '{"shards": [], "shards": []}', "\xff"),
        '{"shards": ' + "[" * 100_000,
    ],
)
def test_other_text_is_no_index(folder, text):
    (folder / "index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ShardError, match="is not the index of MDS shards"):
        read_index(folder)


def large(tmp_path: Path, shards: int) -> Path:
    """The index of a large corpus: two kinds of shards, without the shards."""
    common = {"version": 2, "format": "mds", "hashes": ["xxh64"], "column_names": ["tokens"]}
    common |= {"column_encodings": ["ndarray:uint16:8"], "column_sizes": [16]}
    entries = []
    for number in range(shards):
        raw = {"basename": f"{number}.mds", "bytes": 1000 + number, "hashes": {"xxh64": f"{number:016x}"}}
        packed = {"basename": f"{number}.mds.zstd", "bytes": number + 1, "hashes": {"xxh64": f"{number + 1:016x}"}}
        entries.append(
            {"samples": number, "raw_data": raw, "compression": "zstd" if number % 2 else None}
            | common
            | {"zip_data": packed if number % 2 else None}
        )
    (tmp_path / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return tmp_path


def test_a_large_index_is_read_once_on_a_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = large(tmp_path, 5000)
    first = read_index(folder)
    [table] = (tmp_path / "tmp").glob("*/*.v*")
    assert table.stat().st_mode & 0o077 == 0 or table.parent.stat().st_mode & 0o077 == 0
    read: list[int] = []
    monkeypatch.setattr(shard_index, "_valid_entries", lambda text: read.append(1))
    shard_index._READ.clear()
    second = read_index(folder)
    assert first is not None and second is not None and not read
    assert [*first.shards] == [*second.shards] and second.samples == sum(range(5000))
    for number, shard in ((0, second.shards[0]), (4999, second.shards[4999])):
        assert shard["samples"] == number and shard["raw_data"]["bytes"] == 1000 + number
        assert (shard["zip_data"] is None) == (number == 0) == (shard["compression"] is None)


def test_a_table_that_is_cut_off_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = large(tmp_path, 5000)
    index = read_index(folder)
    expected = index and [*index.shards]
    [file] = (tmp_path / "tmp").glob("*/*.v*")
    for content in (b"", b"shards99", file.read_bytes()[:-1]):
        file.unlink()  # or what is mapped would be cut off
        file.write_bytes(content)
        shard_index._READ.clear()
        found = read_index(folder)
        assert found is not None and [*found.shards] == expected


def test_a_process_that_keeps_the_lock_of_tables_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(table, "_PATIENCE", 0.1)
    lock = tmp_path / f"tmp/llmtrain-indexes-{os.getuid()}/lock"
    lock.parent.mkdir(parents=True, mode=0o700)
    with FileLock(lock):
        index = read_index(large(tmp_path, 5000))
        assert index is not None and len(index.shards) == 5000


def test_a_folder_of_others_is_not_used_for_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / f"llmtrain-indexes-{os.getuid()}").mkdir(parents=True, mode=0o755)
    os.chmod(tmp_path / "tmp" / f"llmtrain-indexes-{os.getuid()}", 0o777)
    assert read_index(large(tmp_path, 5000)) is not None
    assert not list((tmp_path / "tmp").glob("*/*"))
