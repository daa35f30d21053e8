"""A folder appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple

import pytest

from llmtrain.config.output_folder import OutputError, atomic_folder, require_space, unwritable_reason
from llmtrain.progress import format_bytes

Usage = namedtuple("Usage", "total used free")


def test_it_takes_its_name_when_all_is_written(tmp_path):
    out = tmp_path / "a" / "b"
    with atomic_folder(out) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "x").write_text("1")
        assert not out.exists()
    assert (out / "inner" / "x").read_text() == "1"
    assert not partial.exists()


def test_an_empty_folder_may_stand_there(tmp_path):
    with atomic_folder(tmp_path / "out") as partial:
        (tmp_path / "out").mkdir()
        (partial / "x").touch()
    assert (tmp_path / "out" / "x").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs Linux's /proc")
def test_a_place_that_takes_no_files_is_told_even_to_root(tmp_path):
    assert unwritable_reason(tmp_path / "new" / "run") is None
    assert list(tmp_path.iterdir()) == []
    assert "/proc" in str(unwritable_reason("/proc/self/run"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_nothing_and_the_next_attempt_replaces_what_a_kill_left(tmp_path, error):
    def attempt(fails: bool) -> None:
        with atomic_folder(tmp_path / "out") as partial:
            (partial / f"fails={fails}").touch()
            if fails:
                raise error

    with pytest.raises(error):
        attempt(True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "half").touch()
    attempt(False)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "fails=False"]


def test_nothing_is_overwritten(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    with pytest.raises(OutputError, match="exists already"), atomic_folder(out):
        pytest.fail("entered")
    with pytest.raises(OutputError, match="exists already"), atomic_folder(out / "precious"):
        pytest.fail("entered")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"), atomic_folder(tmp_path / "link"):
        pytest.fail("entered")


def test_what_is_there_can_be_replaced(tmp_path):
    for name in ("first", "second"):
        with atomic_folder(tmp_path / "out", replace=True) as partial:
            (partial / name).touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "second"]


def test_what_came_meanwhile_is_not_overwritten(tmp_path):
    def attempt() -> None:
        with atomic_folder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "precious").touch()

    with pytest.raises(OutputError, match="exists already"):
        attempt()
    assert (tmp_path / "out" / "precious").exists()


def test_what_the_disk_refuses_is_told(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match=r"cannot write .*: .*Not a directory"),
        atomic_folder(tmp_path / "file" / "out"),
    ):
        pytest.fail("entered")


def test_space_is_asked_of_the_disk_that_will_hold_it(tmp_path, monkeypatch):
    asked = []

    def usage(path):
        asked.append(path)
        return Usage(0, 0, 10**9)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    out = tmp_path / "not" / "yet" / "there"
    require_space(out, 10**9)
    assert asked == [tmp_path]
    with pytest.raises(OutputError, match=f"{out} needs 27 GB, but {tmp_path} has 1 GB free"):
        require_space(out, 27 * 10**9)
    out = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "x").write_bytes(b"1" * 100)  # a stale attempt makes room
    require_space(out, 10**9 + 100)


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (13_300_000_000, "13.3 GB"), (2 * 10**12, "2 TB"), (1500, "1.5 kB")]
)
def test_sizes_read_well(size, text):
    assert format_bytes(size) == text
