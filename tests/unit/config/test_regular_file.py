"""Files that are read: regular ones, of limited size and depth."""

import os

import pytest

from llmtrain.config import regular_file
from llmtrain.config.regular_file import read_bytes, read_json, read_text


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="not a regular file"):
            read_bytes(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_a_file_beyond_the_limit_is_refused_unread(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(regular_file.MOST_BYTES + 1)
    with pytest.raises(OSError, match="has more than"):
        read_bytes(tmp_path / "sparse")


def test_json_that_is_nested_too_deep_is_an_error_of_the_text(tmp_path):
    (tmp_path / "deep").write_text("[" * 300_000)
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(tmp_path / "deep")
