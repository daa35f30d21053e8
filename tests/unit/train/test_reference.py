"""The file of a reference model's log-probabilities: whatever lies in its place is read whole, or named."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.train.reference import read_reference, write_reference

VALUES = np.arange(6, dtype=np.float32).reshape(3, 2)


def integers(path: Path) -> None:
    """The same bytes under another dtype."""
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


def without_values(path: Path) -> None:
    save_file({"other": load_file(path)["log_p"]}, path)


def in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        integers,
        without_values,
        in_place(os.mkfifo),
        in_place(Path.mkdir),
        in_place(lambda path: path.symlink_to("not-here")),
        in_place(lambda path: path.symlink_to(path.name)),
        in_place(lambda path: path.symlink_to("/dev/zero")),
        in_place(lambda path: path.write_bytes(b"")),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "reference" / "train.safetensors"
    assert read_reference(path, "weights", 3) is None
    write_reference(path, "weights", VALUES)
    found = read_reference(path, "weights", 3)
    assert found is not None and np.array_equal(found, VALUES)
    assert read_reference(path, "other weights", 3) is None and read_reference(path, "weights", 4) is None
    damage(path)
    with pytest.raises(CheckpointError, match=f"{path} .*; remove it, and it is made again"):
        read_reference(path, "weights", 3)
