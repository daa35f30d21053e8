"""A folder counts as a checkpoint only if its manifest says so and every file is as the manifest says."""

import contextlib
import json
import os
import random
import shutil
import socket
from pathlib import Path

import pytest
import torch
import xxhash

from llmtrain.checkpoint import local
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord, Manifest, NewerFormatError, OldFormatError
from llmtrain.checkpoint.format.tensor_file import Entry, TensorFile
from llmtrain.checkpoint.repository import Repository
from tests.support import checkpoints

SAVE, OTHER_SAVE = "0000-a", "0000-b"


def make(root: Path, step: int, save_id: str = SAVE) -> Path:
    folder = root / local.folder_name(step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * 40)
    with TensorFile(folder / "tensors.safetensors", [Entry("a", torch.float32, (100,))], {"save_id": save_id}) as shard:
        shard.append(torch.arange(100.0))
    notes: FileRecord = {"bytes": 10240, "xxh3_128": manifests.hash_file(folder / "__0_0.distcp")}
    files = {"__0_0.distcp": notes, "tensors.safetensors": shard.record}
    manifests.write(
        folder, Manifest(save_id=save_id, step=step, tokens=8, config={}, clock={}, data={}, versions={}, files=files)
    )
    return folder


def rewrite(folder: Path, **changes) -> None:
    """With a checksum of its own, so that it is the content that is looked at."""
    fields = json.loads((folder / manifests.NAME).read_bytes()) | changes
    del fields["xxh3_128"]
    body = json.dumps(fields, indent=1).encode()
    checksum = xxhash.xxh3_128_hexdigest(body)
    (folder / manifests.NAME).write_bytes(body[:-2] + f',\n "xxh3_128": "{checksum}"\n}}\n'.encode())


def as_socket(path: Path) -> None:
    path.unlink()
    with (
        contextlib.chdir(path.parent),
        socket.socket(socket.AF_UNIX) as listener,
    ):  # the path may be longer than allowed
        listener.bind(path.name)


def test_what_is_written_is_read(tmp_path):
    folder = make(tmp_path, 7)
    assert folder.name == "step-00000007"
    rewrite(folder)  # changes nothing: the other tests' damage is what is refused
    manifest = manifests.read(folder)
    assert manifest.step == 7 and manifest.nbytes == sum(record["bytes"] for record in manifest.files.values())
    told: list[int] = []
    manifests.verify(folder, manifest, told.append)
    assert sum(told) == manifest.nbytes
    assert sorted(path.name for path in folder.iterdir()) == ["__0_0.distcp", "manifest.json", "tensors.safetensors"]


DAMAGE = {
    "missing manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "not a complete checkpoint: it has no manifest",
    ),
    "cut manifest": (lambda folder: (folder / "manifest.json").write_text('{"format": 2, '), "cannot be read"),
    "not JSON's text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"), "cannot be read"),
    "another kind of manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "not a checkpoint's manifest",
    ),
    "unknown key": (lambda folder: rewrite(folder, extra=1), "not a checkpoint's manifest: .*extra"),
    "a step that is none": (lambda folder: rewrite(folder, step="x"), "not a checkpoint's manifest: step"),
    "a file outside": (
        lambda folder: rewrite(folder, files={"../x": {"bytes": 1, "xxh3_128": ""}}),
        r"not a checkpoint's manifest: files: \.\./x",
    ),
    "the name of another step": (
        lambda folder: rewrite(folder, step=9),
        "holds step 9, which is not the step of its name",
    ),
    "a parent": (lambda folder: rewrite(folder, files={"..": {"bytes": 1, "xxh3_128": ""}}), r"files: \.\."),
    "a pipe for a manifest": (
        lambda folder: ((folder / "manifest.json").unlink(), os.mkfifo(folder / "manifest.json")),
        "manifest.json cannot be read: not a regular file",
    ),
    "a device for a manifest": (
        lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").symlink_to("/dev/zero")),
        "manifest.json cannot be read: not a regular file",
    ),
    "a socket for a manifest": (lambda folder: as_socket(folder / "manifest.json"), "manifest.json cannot be read"),
    "a folder for a manifest": (
        lambda folder: ((folder / "manifest.json").unlink(), (folder / "manifest.json").mkdir()),
        "manifest.json cannot be read",
    ),
    "a huge manifest": (lambda folder: os.truncate(folder / "manifest.json", 2**40), "has more than"),
    "a pipe": (
        lambda folder: ((folder / "__0_0.distcp").unlink(), os.mkfifo(folder / "__0_0.distcp")),
        "__0_0.distcp is not a regular file",
    ),
    "a broken link": (
        lambda folder: ((folder / "__0_0.distcp").unlink(), (folder / "__0_0.distcp").symlink_to("gone")),
        "__0_0.distcp is not a regular file",
    ),
    "missing file": (lambda folder: (folder / "__0_0.distcp").unlink(), "incomplete: __0_0.distcp is missing"),
    "truncated file": (
        lambda folder: (folder / "__0_0.distcp").write_bytes(b"1234"),
        "__0_0.distcp has 4 bytes, not 10240",
    ),
    "truncated shard": (
        lambda folder: os.truncate(folder / "tensors.safetensors", 300),
        "tensors.safetensors has 300 bytes, not",
    ),
    "a shard cut in its header": (
        lambda folder: os.truncate(folder / "tensors.safetensors", 20),
        "tensors.safetensors has 20 bytes, not",
    ),
    "a shard of another save": (
        lambda folder: shutil.copy(make(folder.parent / "other", 10, OTHER_SAVE) / "tensors.safetensors", folder),
        f"mixed saves: tensors.safetensors belongs to the save {OTHER_SAVE}, the other files to {SAVE}",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_not_whole_is_refused_and_the_one_before_is_found(tmp_path, kind):
    damage, message = DAMAGE[kind]
    before, broken = make(tmp_path, 5), make(tmp_path, 10)
    damage(broken)
    with pytest.raises(CheckpointError, match=message) as error:
        manifests.read(broken)
    warnings: list[str] = []
    found = Repository(tmp_path).newest(warnings.append)
    assert found is not None and found.address == str(before) and found.step == 5
    assert warnings == [f"{error.value}; trying the one before"]
    assert str(broken) in warnings[0]


def test_a_checkpoint_of_a_later_llmtrain_is_not_passed_over_for_an_older_one(tmp_path):
    make(tmp_path, 5)
    rewrite(make(tmp_path, 10), format=99)
    with pytest.raises(NewerFormatError, match=r"written in format 99; this llmtrain reads up to 3. Update llmtrain"):
        Repository(tmp_path).newest(pytest.fail)


def test_a_checkpoint_of_the_first_format_is_recognised_and_not_passed_over(tmp_path):
    make(tmp_path, 5)
    old = tmp_path / "step-00000010"
    old.mkdir()
    (old / "__0_0.distcp").write_bytes(b"12345")
    fields = {"step": 10, "tokens": 8, "config": {}, "clock": {}, "data": {}, "versions": {}, "format": 1}
    (old / "manifest.json").write_text(json.dumps(fields | {"files": {"__0_0.distcp": 5}}))
    with pytest.raises(OldFormatError, match="in format 1 by an earlier llmtrain; `llmtrain checkpoint convert"):
        Repository(tmp_path).newest(pytest.fail)
    assert manifests.read_format_1(old).step == 10
    (old / "__0_0.distcp").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 4 bytes, not 5"):
        manifests.read_format_1(old)


def test_every_flipped_bit_is_found_and_its_file_named(tmp_path):
    folder = make(tmp_path, 5)
    places = random.Random(0)
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        for place in [*range(0, 8 * 30), *(places.randrange(8 * len(content)) for _ in range(150)), -1]:
            checkpoints.flip_bit(file, place)
            with pytest.raises(CheckpointError, match=file.name):
                manifests.verify(folder, manifests.read(folder))
            file.write_bytes(content)
    manifests.verify(folder, manifests.read(folder))


def test_a_manifest_that_was_edited_by_hand_is_refused(tmp_path):
    """As any other damage: what its tokens say would be believed."""
    file = make(tmp_path, 5) / manifests.NAME
    file.write_text(file.read_text().replace('"tokens": 8', '"tokens": 9'))
    with pytest.raises(CheckpointError, match=r"damaged: manifest.json is not what was written"):
        manifests.read(file.parent)


def test_latest_goes_by_step_and_ignores_half_written_folders(tmp_path):
    for step in (9, 10, 100):
        make(tmp_path, step)
    for suffix in (".partial", ".deleted"):
        make(tmp_path, 200).rename(tmp_path / f"step-00000200{suffix}")
    (tmp_path / "step-00000300").write_text("a file")
    found = Repository(tmp_path).newest(pytest.fail)
    assert found is not None and found.step == 100


def test_no_checkpoint_at_all(tmp_path):
    assert Repository(tmp_path / "nowhere").newest(pytest.fail) is None
