"""A folder appears whole or not at all."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from llmtrain.config.output_folder import (
    MARKER,
    OutputError,
    atomic_folder,
    make_marked,
    publish_folder,
    require_space,
    unwritable_reason,
    working_folder,
)
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
def test_a_place_that_takes_no_files_is_reported_even_to_root(tmp_path):
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
    make_marked(tmp_path / "out.partial")
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


def make_and_replace(out: Path, name: str) -> None:
    partial = working_folder(out)
    make_marked(partial)
    (partial / name).touch()
    publish_folder(partial, out, replace=True)


def test_what_is_there_can_be_replaced(tmp_path):
    make_and_replace(tmp_path / "out", "first")
    make_and_replace(tmp_path / "out", "second")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "second"]


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "link", "dead link", "another's mark"])
@pytest.mark.parametrize("suffix", [".partial", ".old", ".partial-2", ".old-2"])
@pytest.mark.parametrize("replace", [True, False])
def test_leaves_what_others_put_beside_the_output(tmp_path, kind, suffix, replace):
    folder, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis").write_text("1")
    folder.mkdir()
    make_and_replace(folder / "out", "first")
    beside = folder / f"out{suffix}"
    if "link" in kind:
        beside.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    elif kind == "file":
        beside.write_text("thesis")
    else:
        beside.mkdir()
        if kind == "another's mark":
            make_marked(folder / "other")
            shutil.move(folder / "other" / MARKER, beside)
            (folder / "other").rmdir()
        if kind != "empty folder":
            (beside / "thesis").write_text("1")
    before = {path: path.lstat().st_mtime_ns for path in (*beside.rglob("*"), beside, elsewhere, elsewhere / "thesis")}
    if replace:
        make_and_replace(folder / "out", "second")
    else:
        shutil.rmtree(folder / "out")
        with atomic_folder(folder / "out") as partial:
            (partial / "second").touch()
    assert {path: path.lstat().st_mtime_ns for path in before} == before
    assert sorted(path.name for path in folder.iterdir()) == sorted(["out", beside.name])
    assert [path.name for path in (folder / "out").iterdir()] == ["second"]


def test_removes_what_a_kill_between_two_renames_left(tmp_path):
    make_marked(tmp_path / "out.old")
    make_and_replace(tmp_path / "out", "first")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_two_processes_that_make_one_folder_use_two(tmp_path):
    with atomic_folder(tmp_path / "out") as first:
        (first / "a").touch()
        with atomic_folder(tmp_path / "out") as second:
            assert second != first
        assert (first / "a").exists() and not second.exists()
        (tmp_path / "out").rmdir()


def test_a_folder_that_is_gone_on_with_is_found_again(tmp_path):
    (tmp_path / "out.partial").mkdir()
    first = working_folder(tmp_path / "out")
    make_marked(first)
    assert first == working_folder(tmp_path / "out") == tmp_path / "out.partial-2"
    with pytest.raises(FileExistsError):
        make_marked(tmp_path / "out.partial")


def test_what_came_meanwhile_is_not_overwritten(tmp_path):
    def attempt() -> None:
        with atomic_folder(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "precious").touch()

    with pytest.raises(OutputError, match="exists already"):
        attempt()
    assert (tmp_path / "out" / "precious").exists()


def test_what_the_disk_refuses_is_reported(tmp_path):
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
    make_marked(tmp_path / "out.partial")
    (tmp_path / "out.partial" / "x").write_bytes(b"1" * 1000)  # a stale attempt makes room
    require_space(out, 10**9 + 1000)


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (13_300_000_000, "13.3 GB"), (2 * 10**12, "2 TB"), (1500, "1.5 kB")]
)
def test_sizes_read_well(size, text):
    assert format_bytes(size) == text
