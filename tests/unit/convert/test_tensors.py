"""A checkpoint's tensors, written and read in pieces, are the tensors that torch saves and loads."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llmtrain.checkpoint.manifest import CheckpointError
from llmtrain.convert import writing
from llmtrain.convert.reading import CheckpointTensors
from llmtrain.convert.writing import LazyTensor, write_parameters
from tests.support.runs import read_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"a.weight": (50, 7), "a.bias": (50,), "scalar": (), "conv": (6, 3, 4)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture(params=["by torch", "in pieces"])
def folder(request, tmp_path, tensors, monkeypatch) -> Path:
    folder = tmp_path / "checkpoint"
    if request.param == "by torch":
        dcp.save({"model": tensors, "optimizer": {"step": 3}}, checkpoint_id=folder, no_dist=True)
        return folder
    monkeypatch.setattr(writing, "PIECE_BYTES", 100)
    folder.mkdir()
    lazy = [LazyTensor(name, SHAPES[name], lambda name=name: tensors[name]) for name in SHAPES]
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_parameters(folder, lazy, told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(told) <= 100 and len(told) == 17 + 2 + 1 + 3
    return folder


def test_elements_come_in_order_in_any_number(folder, tensors):
    found = CheckpointTensors(folder)
    assert sorted(found.names("model.")) == sorted(f"model.{name}" for name in SHAPES)
    assert found.shape("model.nothing") is None
    for name, tensor in tensors.items():
        key, total = f"model.{name}", tensor.numel()
        assert found.shape(key) == tuple(tensor.shape) and found.dtype(key) == torch.float32
        for count in (1, 5, total):
            counts = [count] * (total // count) + [total % count] * (total % count > 0)
            assert torch.equal(torch.cat(list(found.elements(key, counts))), tensor.flatten())


def test_torch_loads_it(folder, tensors, tmp_path):
    into = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
    dcp.load({"model": into}, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(into[name], tensors[name]) for name in SHAPES)
    assert read_tensors(folder, tmp_path / "whole")["model"].keys() == tensors.keys()


def test_a_tensor_is_made_once_and_stored_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "PIECE_BYTES", 16)
    made = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).T.contiguous().T  # not contiguous

    names = ["x", "y", "z"]
    write_parameters(tmp_path, [LazyTensor(n, (3, 2), lambda n=n: make(n)) for n in names], lambda size: None)
    assert made == names
    [elements] = CheckpointTensors(tmp_path).elements("model.y", [6])
    assert elements.dtype == torch.float32 and elements.tolist() == [0, 1, 2, 3, 4, 5]


def read(folder: Path) -> None:
    found = CheckpointTensors(folder)
    for name, shape in SHAPES.items():
        list(found.elements(f"model.{name}", [torch.Size(shape).numel()]))


def test_a_flipped_bit_is_found(tmp_path, tensors):
    """torch.load lets it pass."""
    dcp.save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    [file] = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    place = content.index(tensors["conv"].numpy().tobytes())
    content[place + 100] ^= 1
    file.write_bytes(content)
    dcp.load({"model": {name: torch.empty(shape) for name, shape in SHAPES.items()}}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"is damaged: tensor model.conv: Bad CRC"):
        read(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "another tensor", "no file"])
def test_damage_is_told(tmp_path, tensors, damage):
    dcp.save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    [file] = tmp_path.glob("*.distcp")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "no file":
        file.unlink()
    else:
        (tmp_path / "other").mkdir()
        dcp.save({"model": {n: t.bfloat16() for n, t in tensors.items()}}, checkpoint_id=tmp_path / "other")
        file.write_bytes(next((tmp_path / "other").glob("*.distcp")).read_bytes() + bytes(4000))
    with pytest.raises(CheckpointError, match="is damaged: tensor model"):
        read(tmp_path)


def test_too_few_or_too_many_elements_are_told(tmp_path, tensors):
    dcp.save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    for count, message in ((49, "too many"), (51, "too few")):
        with pytest.raises(CheckpointError, match=message):
            list(CheckpointTensors(tmp_path).elements("model.a.bias", [count]))
