"""A checkpoint's tensors, written and read in pieces, are what was saved."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format import storage
from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord, Manifest
from llmtrain.checkpoint.format.storage import ShardWriter, StatePlanner
from llmtrain.checkpoint.save_load import load_state, stack_of
from llmtrain.convert import lazy_checkpoint
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.convert.lazy_checkpoint import LazyTensor, write_parameters
from tests.support.checkpoints import SAVE_ID

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"model.a.weight": (50, 7), "model.a.bias": (50,), "model.scalar": (), "model.conv": (6, 3, 4)}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def finish(folder: Path, files: dict[str, FileRecord]) -> Manifest:
    written = Manifest(SAVE_ID, 1, 8, config={}, clock={}, data={}, versions={}, files=files)
    manifests.write(folder, written)
    return written


def save(folder: Path, state: dict[str, object], file_bytes: int = 500) -> Manifest:
    """Save tensors as a rank does, in several files."""
    folder.mkdir()
    writer = ShardWriter(folder, SAVE_ID, file_bytes=file_bytes)
    data = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    dcp.save(state, storage_writer=writer, planner=StatePlanner(data), no_dist=True)
    return finish(folder, writer.files)


@pytest.fixture(params=["by ranks", "in pieces"])
def saved(request, tmp_path, tensors, monkeypatch) -> tuple[Path, Manifest]:
    folder = tmp_path / "checkpoint"
    if request.param == "by ranks":
        return folder, save(folder, tensors | {"optimizer.param_groups.a.lr": 3e-4})
    monkeypatch.setattr(lazy_checkpoint, "PIECE_BYTES", 100)
    monkeypatch.setattr(storage, "FILE_BYTES", 500)
    folder.mkdir()
    lazy = [LazyTensor(n.removeprefix("model."), SHAPES[n], lambda n=n: tensors[n]) for n in SHAPES]
    told = []
    files = write_parameters(folder, lazy, told.append, SAVE_ID)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(told) <= 100 and len(told) == 14 + 2 + 1 + 3
    return folder, finish(folder, files)


def test_elements_come_in_order_in_any_number(saved, tensors):
    found = CheckpointTensors(*saved)
    assert sorted(found.names("model.")) == sorted(SHAPES)
    assert found.shape("model.nothing") is None
    for name, tensor in tensors.items():
        total = tensor.numel()
        assert found.shape(name) == tuple(tensor.shape) and found.dtype(name) == torch.float32
        for count in (1, 5, total):
            counts = [count] * (total // count) + [total % count] * (total % count > 0)
            assert torch.equal(torch.cat(list(found.elements(name, counts))), tensor.flatten())


def test_it_is_loaded_with_rows_in_any_number(saved, tensors, monkeypatch):
    folder, manifest = saved
    for size in (1, 100, 2**20):
        monkeypatch.setattr(storage, "READ_BYTES", size)
        into = {name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()}
        load_state(stack_of(folder, manifest), into, verify=True)
        assert all(torch.equal(into[name], tensors[name]) for name in SHAPES)


def test_every_file_is_one_of_the_safetensors_library_and_bears_the_save_id(tmp_path, tensors):
    manifest = save(tmp_path / "checkpoint", dict(tensors))
    names = [name for name in manifest.files if name != "index.json"]
    assert names == ["tensors-00000.safetensors", "tensors-00001.safetensors"]
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {*names, "index.json", "manifest.json"}
    found = {}
    for name in names:
        with safe_open(tmp_path / "checkpoint" / name, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", "save_id": SAVE_ID}
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)


def test_values_and_dtypes_come_back_as_they_were(tmp_path):
    state = {
        "optimizer.lr": 3.0000000000000004e-4,
        "optimizer.betas": (0.9, 0.95),
        "optimizer.name": "é",
        "optimizer.off": None,
        "optimizer.on": True,
        **{f"model.{kind}": torch.arange(6).to(kind).reshape(2, 3) for kind in (torch.bfloat16, torch.int64)},
    }
    manifest = save(tmp_path / "checkpoint", dict(state))
    into = {name: torch.zeros_like(v) if isinstance(v, torch.Tensor) else v and type(v)() for name, v in state.items()}
    load_state(stack_of(tmp_path / "checkpoint", manifest), into, verify=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert into[name].dtype == value.dtype and torch.equal(into[name], value)
        else:
            assert into[name] == value and type(into[name]) is type(value)


def test_a_tensor_is_made_once_and_stored_in_fp32(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_checkpoint, "PIECE_BYTES", 16)
    made = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.arange(6, dtype=torch.bfloat16).reshape(3, 2).T.contiguous().T  # not contiguous

    names = ["x", "y", "z"]
    lazy = [LazyTensor(n, (3, 2), lambda n=n: make(n)) for n in names]
    manifest = finish(tmp_path, write_parameters(tmp_path, lazy, lambda size: None, SAVE_ID))
    assert made == names
    [elements] = CheckpointTensors(tmp_path, manifest).elements("model.y", [6])
    assert elements.dtype == torch.float32 and elements.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["cut", "another dtype", "no file"])
def test_damage_is_reported(tmp_path, tensors, damage):
    manifest = save(tmp_path / "checkpoint", dict(tensors), file_bytes=10**9)
    [file] = (tmp_path / "checkpoint").glob("*.safetensors")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "no file":
        file.unlink()
    else:
        save(tmp_path / "other", {n: t.bfloat16() for n, t in tensors.items()}, file_bytes=10**9)
        file.write_bytes((tmp_path / "other" / file.name).read_bytes())
    found = CheckpointTensors(tmp_path / "checkpoint", manifest)
    with pytest.raises(CheckpointError, match="is damaged: tensor model"):
        [list(found.elements(name, [torch.Size(shape).numel()])) for name, shape in SHAPES.items()]


def test_too_few_or_too_many_elements_are_reported(tmp_path, tensors):
    manifest = save(tmp_path / "checkpoint", dict(tensors))
    for count, message in ((49, "too many"), (51, "too few")):
        with pytest.raises(CheckpointError, match=message):
            list(CheckpointTensors(tmp_path / "checkpoint", manifest).elements("model.a.bias", [count]))
