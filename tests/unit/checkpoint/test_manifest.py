"""A folder counts as a checkpoint only if its manifest says so and every file is as the manifest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, Manifest, NewerFormatError


def make(root: Path, step: int) -> Path:
    folder = root / manifests.folder_name(step)
    folder.mkdir(parents=True)
    (folder / "shard.bin").write_bytes(b"12345")
    written = Manifest(step=step, tokens=8, config={}, clock={}, data={}, versions={}, files={"shard.bin": 5})
    manifests.write(folder, written)
    return folder


def rewrite(folder: Path, **changes) -> None:
    file = folder / manifests.NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_is_written_is_read(tmp_path):
    folder = make(tmp_path, 7)
    assert folder.name == "step-00000007"
    assert manifests.read(folder).step == 7
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "shard.bin"]


DAMAGE = {
    "missing manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "not a complete checkpoint: it has no manifest",
    ),
    "cut manifest": (lambda folder: (folder / "manifest.json").write_text('{"format": 1, '), "cannot be read"),
    "not JSON's text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"), "cannot be read"),
    "another kind of manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "not a checkpoint's manifest",
    ),
    "unknown key": (lambda folder: rewrite(folder, extra=1), "not a checkpoint's manifest: .*extra"),
    "missing file": (lambda folder: (folder / "shard.bin").unlink(), "incomplete: shard.bin is missing"),
    "truncated file": (lambda folder: (folder / "shard.bin").write_bytes(b"1234"), "shard.bin has 4 bytes, not 5"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_not_whole_is_refused_and_the_one_before_is_found(tmp_path, kind):
    damage, message = DAMAGE[kind]
    before, broken = make(tmp_path, 5), make(tmp_path, 10)
    damage(broken)
    with pytest.raises(CheckpointError, match=message) as error:
        manifests.read(broken)
    warnings: list[str] = []
    found = manifests.latest(tmp_path, warnings.append)
    assert found is not None and found[0] == before and found[1].step == 5
    assert warnings == [f"{error.value}; trying the one before"]
    assert str(broken) in warnings[0]


def test_a_checkpoint_of_a_later_llmtrain_is_not_passed_over_for_an_older_one(tmp_path):
    make(tmp_path, 5)
    rewrite(make(tmp_path, 10), format=99)
    with pytest.raises(NewerFormatError, match=r"written in format 99; this llmtrain reads up to 1. Update llmtrain"):
        manifests.latest(tmp_path, pytest.fail)


def test_latest_goes_by_step_and_ignores_half_written_folders(tmp_path):
    for step in (9, 10, 100):
        make(tmp_path, step)
    make(tmp_path, 200).rename(tmp_path / "step-00000200.partial")
    (tmp_path / "step-00000300").write_text("a file")
    found = manifests.latest(tmp_path, pytest.fail)
    assert found is not None and found[1].step == 100


def test_no_checkpoint_at_all(tmp_path):
    assert manifests.latest(tmp_path / "nowhere", pytest.fail) is None
