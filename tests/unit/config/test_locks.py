"""Locks between processes, and private folders for them."""

import os
import tempfile

import pytest
from filelock import FileLock, Timeout

from llmtrain.config import locks
from llmtrain.config.locks import locked, private_folder, required_folder
from llmtrain.data.partitions.stored_folder import scratch_folder
from llmtrain.errors import RunError, about_a_file


def test_a_lock_of_another_is_named_and_waited_for_no_longer_than_patience(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "_SILENT_SECONDS", 0.05)
    caplog.set_level("INFO", "llmtrain")
    with FileLock(tmp_path / "lock"), pytest.raises(Timeout), locked(tmp_path / "lock", "makes a table", patience=0.1):
        pass
    assert f"another process makes a table: waiting for it to end ({tmp_path / 'lock'} is locked)" in caplog.text


def test_a_folder_that_others_may_use_is_not_private(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder("locks")
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_folder("locks") is None
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert private_folder("locks") is None
    assert folder.name.endswith(str(os.getuid()))
    folder.unlink()
    folder.mkdir(0o755)  # an earlier version's
    assert private_folder("locks") == folder and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "put",
    [
        lambda place: place.write_text("x"),
        lambda place: place.symlink_to("/nowhere"),
        lambda place: place.symlink_to("/tmp"),
        lambda place: (place.mkdir(), place.chmod(0o777)),
        lambda place: (place.mkdir(0o700), os.chown(place, 12345, 12345)),
        os.mkfifo,
    ],
    ids=["file", "link to nowhere", "link", "anyone's", "another's", "pipe"],
)
def test_what_others_put_in_a_shared_temporary_folder_is_named(put, request, tmp_path, monkeypatch):
    if request.node.callspec.id == "another's" and os.getuid():
        pytest.skip("needs root")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"llmtrain-prepare-{os.getuid()}"
    put(place)
    with pytest.raises(RunError, match=f"{place} cannot hold files of this user alone; remove it, or set TMPDIR"):
        scratch_folder("s3://bucket/data")
    assert required_folder("run-locks", "locks").is_dir()


def test_a_machine_without_a_temporary_folder_is_named(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(FileNotFoundError) as raised:
        private_folder("locks")
    assert str(about_a_file(raised.value)) == "no folder for temporary files can be written; set TMPDIR to one that can"
