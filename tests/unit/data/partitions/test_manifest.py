"""Manifests of `llmtrain prepare` that are damaged: the key is named, by every reader."""

import json
from pathlib import Path

import pytest

from llmtrain.data.partitions.prepared_folder import LATER_SETTINGS, find_reusable, read_manifest
from llmtrain.data.prepare_problems import PrepareError
from llmtrain.data.tokenize.end_of_document import recorded_begins

COUNTS = {"documents": 1, "bytes": 2, "tokens": 3, "samples": 4}
WHOLE = {
    "inputs": {"seq_len": 8},
    "tokenizer": {"eod_id": 0, "vocab_size": 9},
    "seq_len": 8,
    "splits": {"train": COUNTS},
    "skipped": {"count": 0, "first": []},
    "baselines": {},
}


def write(folder: Path, changes: dict) -> Path:
    (folder / "manifest.json").write_text(json.dumps(WHOLE | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"splits": [3]}, "splits"),
        ({"splits": {"train": 3}}, "splits.train"),
        ({"splits": {"train": COUNTS | {"samples": "4"}}}, "splits.train.samples"),
        ({"splits": {"train": COUNTS | {"tokens": -1}}}, "splits.train.tokens"),
        ({"tokenizer": 4}, "tokenizer"),
        ({"tokenizer": {"vocab_size": 9}}, "tokenizer.eod_id"),
        ({"tokenizer": {"eod_id": True}}, "tokenizer.eod_id"),
        ({"inputs": None}, "inputs"),
        ({"seq_len": "8"}, "seq_len"),
    ],
)
def test_a_section_of_another_kind_is_named(tmp_path, changes, named):
    with pytest.raises(PrepareError, match=rf"manifest\.json: {named}: not what `llmtrain prepare` writes there"):
        read_manifest(write(tmp_path, changes))


def test_a_part_of_a_manifest_is_read_and_is_none_of_a_folder_to_reuse(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"inputs": {}}))
    assert read_manifest(tmp_path) == {"splits": {}, "inputs": {}}
    assert recorded_begins(read_manifest(tmp_path)) is None
    with pytest.raises(PrepareError, match="it lacks baselines, seq_len, skipped, tokenizer; make the folder anew"):
        find_reusable(tmp_path, LATER_SETTINGS, overwrite=False)
