"""Damage of every kind, met by all ranks alike: named, never loaded, and never in the way of an older good checkpoint."""

import contextlib
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from llmtrain.checkpoint import local, save_load
from llmtrain.checkpoint.collective import newest_checkpoint
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.retention import Retention
from llmtrain.schema.config import Config
from tests.support.checkpoints import edit_manifest, flip_bit
from tests.support.ranks import RankFailed
from tests.support.runs import read_tensors
from tests.support.sharded import build, same, state_of, write
from tests.support.tiny import tiny_config


@pytest.fixture(scope="module")
def config(shards, tmp_path_factory) -> Config:
    return tiny_config(shards, tmp_path_factory.mktemp("config") / "run")


def save_steps(config: Config, root: Path) -> None:
    model, optimizer = build(config)
    for step in (1, 2, 3):
        write(root, model, optimizer, step)


@pytest.fixture(scope="module")
def three(ranks, config, tmp_path_factory) -> Path:
    """Steps 1, 2 and 3 as two ranks save them."""
    root = tmp_path_factory.mktemp("three")
    ranks(2).run(save_steps, config, root)
    return root


@pytest.fixture
def root(three, tmp_path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "checkpoints"))


def find(root: Path, verify: bool) -> tuple[str | None, list[str]]:
    """A job: (the step that a run would continue from, or what it refuses with; what it warns of)."""
    warnings: list[str] = []
    try:
        found = newest_checkpoint(root, verify=verify, warn=warnings.append)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}", warnings
    return found and found.folder.name, warnings


def load(config: Config, folder: Path, verify: bool) -> str | None:
    """A job: what loading is refused with."""
    model, optimizer = build(config)
    try:
        save_load.load(folder, model, optimizer, verify=verify)
    except CheckpointError as error:
        return str(error)
    return None


def agreed(answers: list) -> Any:
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


def shard(folder: Path, place: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[place]


def copy_shard(folder: Path) -> None:
    shutil.copy(shard(folder.parent / "step-00000002", 1), shard(folder, 1))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the first shard": (lambda folder: flip_bit(shard(folder, 0), -9), "damaged: tensors-00000.safetensors"),
    "a bit of the last shard": (lambda folder: flip_bit(shard(folder, -1), -99), "damaged: tensors-00001.safetensors"),
    "a bit of a header": (lambda folder: flip_bit(shard(folder, 0), 8 * 100), "tensors-00000.safetensors"),
    "a bit of the index": (lambda folder: flip_bit(folder / "index.json", 999), "damaged: index.json"),
    "a bit of the manifest": (lambda folder: flip_bit(folder / "manifest.json", 999), "manifest.json"),
    "a shard cut short": (
        lambda folder: shard(folder, 1).write_bytes(shard(folder, 1).read_bytes()[:-1]),
        "damaged: tensors-00001.safetensors has",
    ),
    "a shard that is gone": (lambda folder: shard(folder, 0).unlink(), "incomplete: tensors-00000.safetensors"),
    "a shard of another save": (copy_shard, "mixed saves: tensors-00001.safetensors belongs to the save"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_named_and_the_one_before_is_taken(ranks, root, kind):
    damage, message = DAMAGE[kind]
    damage(root / "step-00000003")
    name, warnings = agreed(ranks(2).run(find, root, True))
    assert name == "step-00000002"
    assert len(warnings) == 1 and warnings[0].startswith("WARNING: ") and message in warnings[0]
    assert str(root / "step-00000003") in warnings[0]


@pytest.mark.parametrize("kind", list(DAMAGE)[:7])
def test_it_is_not_loaded_by_name_either(ranks, config, root, kind):
    damage, message = DAMAGE[kind]
    damage(root / "step-00000003")
    assert message in agreed(ranks(2).run(load, config, root / "step-00000003", True))


def test_without_the_hashes_a_flipped_bit_would_pass(ranks, config, root):
    flip_bit(shard(root / "step-00000003", 0), -9)
    assert agreed(ranks(2).run(find, root, False)) == ("step-00000003", [])
    assert agreed(ranks(2).run(load, config, root / "step-00000003", False)) is None


def test_when_nothing_is_good_the_run_does_not_start_anew(ranks, root):
    for folder in local.folders(root):
        flip_bit(shard(folder, 1), -9)
    refused, warnings = agreed(ranks(2).run(find, root, True))
    assert "no checkpoint of this run can be used" in refused and "--fresh" in refused
    assert len(warnings) == 3
    assert len(local.folders(root)) == 3


def test_where_there_is_none_there_is_none(ranks, tmp_path):
    (tmp_path / "step-00000007.partial").mkdir()
    assert agreed(ranks(2).run(find, tmp_path, True)) == (None, [])


def test_another_format_is_refused_by_all(ranks, root):
    edit_manifest(root / "step-00000003", format=99)
    refused, _ = agreed(ranks(2).run(find, root, True))
    assert refused.startswith("NewerFormatError: ") and "written in format 99" in refused


def test_a_checkpoint_that_was_being_replaced_is_found(ranks, root):
    (root / "step-00000003").rename(root / "step-00000003.replaced")
    (root / "step-00000003.partial").mkdir()
    assert agreed(ranks(2).run(find, root, True)) == ("step-00000003", [])
    assert sorted(path.name for path in root.iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]


class Malice:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "index.json", "manifest.json", ".metadata"])
@pytest.mark.parametrize("protocol", ["pickle", "torch.save"])
def test_a_pickle_is_not_executed_wherever_it_is(ranks, config, root, tmp_path, name, protocol):
    folder, marker = root / "step-00000003", tmp_path / "executed"
    before = manifests.read(folder)
    content = io.BytesIO()
    (pickle.dump if protocol == "pickle" else torch.save)(Malice(marker), content)
    (folder / name).write_bytes(content.getvalue())
    if name in before.files:
        record: FileRecord = {"bytes": (folder / name).stat().st_size, "xxh3_128": manifests.hash_file(folder / name)}
        edit = before.files | {name: record}
        manifests.write(folder, replace(before, files=edit))
    refusal = agreed(ranks(2).run(load, config, folder, True))
    found, _ = agreed(ranks(2).run(find, root, True))
    assert (refusal is None) == (name == ".metadata") and found == f"step-0000000{3 if refusal is None else 2}"
    assert not marker.exists()
    # It would have been:
    if protocol == "pickle":
        (tmp_path / ".metadata").write_bytes(content.getvalue())
        with contextlib.suppress(AttributeError):
            FileSystemReader(tmp_path).read_metadata()
    else:
        torch.load(io.BytesIO(content.getvalue()), weights_only=False)
    assert marker.exists()


WORDS = ("cuda", "rocm", "hip", "nvidia", "amd", "triton", "flash", "sdpa", "nccl", "rank", "world", "device", "fused")


def save_as(config: Config, root: Path, machine: dict[str, bool]) -> None:
    model, optimizer = build(config)
    for group in optimizer.param_groups:
        group.update(machine)
    write(root, model, optimizer, 1)


def content_of(folder: Path) -> tuple[Index, dict[str, torch.Tensor]]:
    index = indexes.read(folder, manifests.read(folder))
    return Index("", index.tensors, index.values), read_tensors(folder)


def test_nothing_in_it_names_a_machine(ranks, config, tmp_path):
    """AdamW's fused kernels of a GPU and the plain loops of a CPU leave the same checkpoint."""
    for name, machine in {"gpu": {"fused": True, "capturable": True}, "cpu": {"fused": None, "foreach": True}}.items():
        ranks(1).run(save_as, config, tmp_path / name, machine)
    ones = [content_of(tmp_path / name / "step-00000001") for name in ("gpu", "cpu")]
    assert ones[0][0] == ones[1][0]
    for name, value in ones[0][1].items():
        assert torch.equal(value, ones[1][1][name]) if torch.is_tensor(value) else value == ones[1][1][name]
    folder = tmp_path / "gpu" / "step-00000001"
    content = asdict(manifests.read(folder)) | {"config": {}}
    content_text = json.dumps(content) + (folder / "index.json").read_text() + str(list(folder.iterdir()))
    assert [word for word in WORDS if word in content_text.lower().replace(str(tmp_path).lower(), "")] == []


ROCM = {"torch": "2.11.0+rocm7.1", "mosaicml": "0.32.1", "triton-rocm": "3.6.0"}
CUDA = {"torch": "2.11.0+cu130", "mosaicml": "0.32.1", "nvidia-nccl-cu13": "2.28"}


def load_exactly(config: Config, folder: Path) -> tuple[bool, list[object]]:
    """A job: whether what was saved (by `build`) comes back, and how this machine's optimizer runs after it."""
    expected = state_of(*build(config))
    model, optimizer = build(config, seed=2)
    assert not same(state_of(model, optimizer), expected)
    save_load.load(folder, model, optimizer)
    return same(state_of(model, optimizer), expected), [group["fused"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("vendor", "size"), [(ROCM, 1), (CUDA, 2)], ids=["ROCm", "CUDA"])
def test_metadata_of_another_vendor_round_trips(ranks, config, root, vendor, size):
    """Values that other versions of torch and of AdamW leave in a checkpoint: versions, and settings of absent kernels."""
    folder = root / "step-00000003"
    before = manifests.read(folder)
    index = indexes.read(folder, before)
    names = [name.removesuffix(".lr") for name in index.values if name.endswith(".lr")]
    foreign = {f"{name}.{key}": value for name in names for key, value in {"fused": False, "capturable": True}.items()}
    record = indexes.write(folder, Index(index.save_id, index.tensors, index.values | foreign))
    manifests.write(folder, replace(before, versions=vendor, files=before.files | {"index.json": record}))
    for exact, fused in ranks(size).run(load_exactly, config, folder):
        assert exact and fused == [True, True]
    Repository(root).prune(Retention(last=1))
    assert manifests.read(folder).versions == vendor


def load_another_model(config: Config, folder: Path) -> None:
    model, optimizer = build(config)
    save_load.load(folder, model, optimizer)


@pytest.mark.parametrize(
    ("change", "message"), [({"model.layers": "m (s+m)*3"}, "Missing key"), ({"model.d_model": 64}, "Size mismatch")]
)
def test_tensors_that_do_not_fit_are_reported_on_every_rank(ranks, shards, root, tmp_path, change, message):
    with pytest.raises(RankFailed) as error:
        ranks(2).run(load_another_model, tiny_config(shards, tmp_path, change), root / "step-00000003")
    assert str(error.value).count(f"CheckpointError: {root}/step-00000003 cannot be loaded") == 2
    assert message in str(error.value)
