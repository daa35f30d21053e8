"""Locks between processes, and private folders for them."""

import os
import tempfile

import pytest
from filelock import FileLock, Timeout

from llmtrain.config import locks
from llmtrain.config.locks import locked, private_folder


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
