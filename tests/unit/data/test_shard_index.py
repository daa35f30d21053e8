"""Shards of others: an index cannot run code, nor reach outside of its folder, nor hang what reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.shard_index import Index, ShardError, read_index


@pytest.fixture
def folder(tmp_path, write_shards) -> Path:
    return write_shards(tmp_path / "shards", 20)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the last shard's entry."""
    index = json.loads((folder / "index.json").read_text())
    edit(index["shards"][-1])
    (folder / "index.json").write_text(json.dumps(index))


def test_an_index_of_streaming_dataset_is_read(folder):
    index = read_index(folder)
    assert index is not None and index.samples == 20 and index.hash_algorithm == "xxh64"


def test_a_merged_index_names_files_in_subfolders(folder):
    change(folder, lambda shard: shard["raw_data"].update(basename="0/shard.00000.mds"))
    assert read_index(folder) is not None


def test_a_shard_that_is_named_twice_is_refused(folder):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"shards": [*index["shards"], index["shards"][0]]}))
    with pytest.raises(ShardError, match=r"names the shard shard\.00000\.mds 2 times"):
        read_index(folder)


@pytest.mark.parametrize("encoding", ["pkl", "pkl:", "list[pkl]", "exec"])
def test_a_column_that_is_not_plain_data_is_refused(folder, encoding):
    change(folder, lambda shard: shard.update(column_encodings=[encoding]))
    with pytest.raises(ShardError, match=r"index.json .*shards\.\d+\.column_encodings\.0: .*(any code|no encoding)"):
        read_index(folder)


NAMES = ["../x", "../../../x", "/tmp/x", "a/../../x", "", ".", "..", "a//b", "x\0y", "a/"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["raw_data", "zip_data"])
def test_a_name_that_leaves_the_folder_is_refused(folder, part, name):
    change(folder, lambda shard: shard[part].update(basename=name))
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
    change(folder, lambda shard: shard.update(wrong))
    with pytest.raises(ShardError, match="is not the index of MDS shards"):
        read_index(folder)


def test_a_pipe_does_not_hang(folder):
    (folder / "index.json").unlink()
    os.mkfifo(folder / "index.json")
    with pytest.raises(ShardError, match="not a regular file"):
        read_index(folder)


def test_the_fastest_hash_is_taken(tmp_path):
    assert Index(tmp_path, [{"hashes": ["sha1", "xxh64"]}]).hash_algorithm == "xxh64"
    assert Index(tmp_path, [{"hashes": ["md5", "sha1"]}, {"hashes": ["sha1"]}]).hash_algorithm == "sha1"
    assert Index(tmp_path, [{"hashes": ["of-tomorrow", "shake_128"]}]).hash_algorithm is None
