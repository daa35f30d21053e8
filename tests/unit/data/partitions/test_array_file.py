"""Files of arrays are read as they were written, and damage to them is told."""

from typing import Any

import numpy as np
import pytest

from llmtrain.data.partitions.array_file import pack_arrays, unpack_arrays
from llmtrain.data.partitions.provenance import DocumentRecorder, documents_path, read_documents, write_documents
from llmtrain.data.sources.files import SourceFile
from llmtrain.data.sources.records import Slice

ARRAYS = {
    "counts": np.arange(5000) ** 2,
    "none": np.zeros(0, np.uint16),
    "matrix": np.random.default_rng(0).integers(0, 9, (3, 4)).astype(np.int32),
    "strided": np.arange(20, dtype=np.uint8)[::3],
    "one": np.array(7.5),
}


def same(found: dict, expected: dict) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == array.dtype and np.array_equal(found[name], array) for name, array in expected.items()
    )


def test_arrays_are_read_as_they_were_written():
    content = pack_arrays(ARRAYS)
    assert same(unpack_arrays(content), ARRAYS) and content == pack_arrays(ARRAYS)
    assert same(unpack_arrays(pack_arrays({})), {})


@pytest.mark.parametrize("place", [0, 4, 40, -1, None])
def test_damage_is_a_value_error(place):
    content = pack_arrays(ARRAYS)
    damaged = bytearray(content[:-20] if place is None else content)
    if place is not None:
        damaged[place] ^= 64
    with pytest.raises(ValueError):
        unpack_arrays(bytes(damaged))


def test_documents_that_earlier_versions_recorded_are_read(tmp_path):
    recorder = DocumentRecorder(["train"])
    number = recorder.begin(Slice(SourceFile("/a.jsonl", "a.jsonl", 1, 0, False), 0, 1))
    recorder.add("train", np.full(9, number), np.arange(9), np.arange(9) + 3, np.arange(9) * 4)
    documents = recorder.documents({})
    write_documents(tmp_path, "one", documents)
    file = documents_path(tmp_path, "one")
    arrays: dict[str, Any] = unpack_arrays(file.read_bytes())
    np.savez(tmp_path / "one.documents.npz", **arrays)
    file.unlink()
    found = read_documents(tmp_path, "one")
    assert found is not None and found.slices == documents.slices
    assert found.tables["train"].tokens.tolist() == documents.tables["train"].tokens.tolist()
