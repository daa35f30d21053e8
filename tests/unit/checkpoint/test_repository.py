"""Folders that are replaced, deleted and found again after a kill at any moment between two system calls."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from llmtrain.checkpoint import local
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.retention import Retention
from tests.support.stores import make_checkpoint
from tests.unit.checkpoint.test_manifest import make, rewrite


class Killed(BaseException):
    """Stands for kill -9: nothing runs after it."""


def killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Runs an action up to its `moment`-th change of the disk; whether it got that far. rmtree stops half way."""
    left = [moment]
    rename, rmtree = Path.rename, shutil.rmtree

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    def renaming(self, target):
        count()
        return rename(self, target)

    def deleting(folder, *args, **kwargs):
        count()
        next(iter(sorted(Path(folder).iterdir()))).unlink()
        count()
        rmtree(folder, *args, **kwargs)

    with patch.object(Path, "rename", renaming), patch("shutil.rmtree", deleting):
        try:
            action()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_while_a_step_is_saved_again_loses_neither_it_nor_one_before(tmp_path, moment):
    root = tmp_path / "checkpoints"
    make(root, 4)
    make(root, 5, "old")
    partial = make(tmp_path / "elsewhere", 5, "new").rename(root / "step-00000005.partial")
    final = root / "step-00000005"
    interrupted = killed_at(moment, lambda: local.replace(partial, final))
    assert interrupted == (moment < 5)
    found = Repository(root).newest(pytest.fail)  # before anything is tidied up
    assert found is not None and found.step == 5
    assert found.require().save_id == ("old" if moment < 2 else "new")
    local.recover(root)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000004", "step-00000005"]
    again = manifests.read(final)
    manifests.verify(final, again)
    assert again.save_id == found.require().save_id


@pytest.mark.parametrize("broken_link", [False, True])
def test_a_file_that_has_the_name_of_a_checkpoint_is_kept_aside_and_loses_no_save(tmp_path, broken_link):
    root, final = tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-00000005"
    partial = make(root, 5).rename(root / "step-00000005.partial")
    final.symlink_to("nowhere") if broken_link else final.write_text("mine")
    final.with_name(final.name + local.REPLACED).touch()
    assert [path.name for path in local.misplaced(root)] == [final.name, final.name + local.REPLACED]
    local.replace(partial, final)
    manifests.verify(final, manifests.read(final))
    [kept] = root.glob("step-00000005.file-*")
    assert kept.is_symlink() if broken_link else kept.read_text() == "mine"
    theirs = final.with_name(final.name + local.REPLACED)
    assert sorted(root.iterdir()) == [final, kept, theirs]


@pytest.mark.parametrize(
    "suffix", ["", local.PARTIAL, local.DELETED, local.REPLACED, local.DOWNLOADING, ".deleted.deleted"]
)
def test_nothing_deletes_a_folder_of_this_name_that_holds_no_checkpoint(tmp_path, suffix):
    theirs = tmp_path / f"step-00000002{suffix}"
    theirs.mkdir()
    (theirs / "thesis").write_text("1")
    for step in (3, 4):
        make(tmp_path, step)
    local.recover(tmp_path)
    Repository(tmp_path).prune(Retention(last=1))
    local.replace(make(tmp_path / "elsewhere", 4, "again"), tmp_path / "step-00000004")
    assert (theirs / "thesis").exists()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [theirs.name, "step-00000004"]
    local.clear(theirs, make=True)  # a save needs the name
    [kept] = tmp_path.glob(f"{theirs.name}.file-*/thesis")
    assert kept.read_text() == "1"
    with pytest.raises(CheckpointError, match="thesis"):
        local.LocalCheckpoint(kept.parent).delete()


@pytest.mark.parametrize("left", [False, True])
def test_what_a_user_put_into_a_checkpoint_outlives_it(tmp_path, capsys, left):
    """As `llmtrain export RUN CHECKPOINT/hf` does."""
    old, _ = make(tmp_path, 1), make(tmp_path, 2)
    (old / "hf").mkdir()
    (old / "hf" / "model.safetensors").write_text("mine")
    (old / "notes.txt").write_text("mine")
    if left:  # by a kill in the middle of a deletion
        old.rename(tmp_path / "step-00000001.deleted")
        local.recover(tmp_path)
    else:
        Repository(tmp_path).prune(Retention(last=1))
    [kept] = tmp_path.glob("step-00000001*")
    assert sorted(path.name for path in kept.rglob("*")) == ["hf", "model.safetensors", "notes.txt"]
    assert f"(hf, notes.txt): now in {kept}" in capsys.readouterr().err
    assert [found.step for found in Repository(tmp_path).checkpoints()] == [2]


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_while_old_checkpoints_are_deleted_leaves_no_half_of_one(tmp_path, moment):
    for step in (1, 2, 3):
        make(tmp_path, step)
    killed_at(moment, lambda: Repository(tmp_path).prune(Retention(last=1)))
    for folder in local.folders(tmp_path):
        manifests.verify(folder, manifests.read(folder))
    assert (tmp_path / "step-00000003").is_dir()
    local.recover(tmp_path)
    Repository(tmp_path).prune(Retention(last=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def steps_after(root: Path, retention: Retention) -> list[int]:
    Repository(root).prune(retention)
    return [local.step_of(folder) for folder in local.folders(root)]


def test_the_last_stay_and_the_first_of_every_so_many_steps(tmp_path):
    for step in (4, 8, 12, 16, 20, 24, 28):
        make(tmp_path, step)
    assert steps_after(tmp_path, Retention()) == [4, 8, 12, 16, 20, 24, 28]
    assert steps_after(tmp_path, Retention(last=2, every=10)) == [12, 20, 24, 28]
    assert steps_after(tmp_path, Retention(last=2, every=10)) == [12, 20, 24, 28]  # and they stay
    assert steps_after(tmp_path, Retention(last=1, also=20)) == [20, 28]
    assert steps_after(tmp_path, Retention(last=1)) == [28]


def test_a_damaged_checkpoint_among_the_newest_is_left_to_be_examined(tmp_path):
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    for step in (1, 4):
        (tmp_path / local.folder_name(step) / "__0_0.distcp").unlink()
    assert steps_after(tmp_path, Retention(last=2)) == [3, 4, 5]


def test_damaged_checkpoints_do_not_push_out_the_last_good_one(tmp_path):
    for step in (1, 2, 3, 4, 5):
        make(tmp_path, step)
    for step in (1, 4, 5):
        (tmp_path / local.folder_name(step) / "__0_0.distcp").unlink()
    assert steps_after(tmp_path, Retention(last=1)) == [3, 4, 5]
    for step in (4, 5):
        (tmp_path / local.folder_name(step) / "manifest.json").unlink()
    assert steps_after(tmp_path, Retention(last=1)) == [3, 4, 5]


def test_where_nothing_is_good_nothing_is_deleted(tmp_path):
    for step in (1, 2):
        (make(tmp_path, step) / "__0_0.distcp").unlink()
    assert steps_after(tmp_path, Retention(last=1)) == [1, 2]


def test_a_checkpoint_of_another_format_is_not_judged(tmp_path):
    rewrite(make(tmp_path, 1), format=99)
    for step in (2, 3):
        make(tmp_path, step)
    assert steps_after(tmp_path, Retention(last=1)) == [1, 3]


def test_reads_the_newest_that_stays_where_a_run_deletes_what_is_read(tmp_path):
    make(tmp_path, 1)
    seen = []

    def read(folder: Path, manifest: manifests.Manifest) -> int:
        seen.append(manifest.step)
        if manifest.step < 3:  # the run saves, and keeps one
            make(tmp_path, manifest.step + 1)
            Repository(tmp_path).prune(Retention(last=1))
        (folder / "manifest.json").read_bytes()
        return manifest.step

    assert Repository(tmp_path).read(read) == 3
    assert seen == [1, 2, 3]


def test_an_error_of_a_checkpoint_that_is_there_is_raised_at_once(tmp_path):
    folder, calls = make(tmp_path, 1), []

    def fail(folder: Path, manifest: manifests.Manifest) -> None:
        calls.append(folder)
        raise CheckpointError("damaged")

    for place in (tmp_path, folder):
        with pytest.raises(CheckpointError, match="damaged"):
            Repository(place).read(fail)
    assert len(calls) == 2
    with pytest.raises(FileNotFoundError):  # the one that was named is not replaced by another
        Repository(folder).read(lambda found, _: (shutil.rmtree(found), found.stat()))


def test_a_checkpoint_is_own_by_its_manifest_and_a_folder_of_notes_is_not(tmp_path):
    folder = make_checkpoint(tmp_path, 3)
    (folder / "notes.txt").write_text("the good one")
    assert local.is_own(folder)
    (folder / "manifest.json").unlink()
    assert not local.is_own(folder)


@pytest.mark.parametrize("target", ["a checkpoint", "nothing"])
def test_the_deletion_of_a_link_leaves_what_it_points_to(tmp_path, target):
    kept = make_checkpoint(tmp_path / "elsewhere", 3)
    link = tmp_path / "step-00000003"
    link.symlink_to(kept if target == "a checkpoint" else tmp_path / "gone")
    local.delete(link)
    assert not link.is_symlink() and local.is_own(kept)
