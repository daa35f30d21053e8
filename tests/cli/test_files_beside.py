"""Files and folders of the user beside an output: no command uses, removes or changes them."""

from pathlib import Path

import pytest

from llmtrain.cli import main
from tests.support import checkpoints

SUFFIXES = (".partial", ".old", ".partial-2", ".replaced", ".deleted", ".tmp", ".before", ".lock")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A checkpoint, its export, and texts."""
    folder = tmp_path_factory.mktemp("sources")
    checkpoints.save(folder / "checkpoint", checkpoints.mpt(32, 2, 300))
    assert main(["export", str(folder / "checkpoint"), str(folder / "hf")]) == 0
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("\n".join(f"line {number} of a text" for number in range(2000)))
    return folder


PREPARE = ["prepare", "texts", "--seq-len", "32", "--validation-fraction", "0", "--vocab-size"]
COMMANDS = {
    "prepare": [*PREPARE, "300", "--out"],
    "prepare again": [*PREPARE, "301", "--overwrite", "--out"],
    "export": ["export", "checkpoint"],
    "import": ["import", "hf"],
    "convert": ["checkpoint", "convert", "--to", "llmtrain", "checkpoint"],
}


def state(folder: Path) -> dict[str, tuple[int, int, bytes | None]]:
    """Inode, time of change and content of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_ino,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
        if path.name != "out" and "out/" not in f"{path.relative_to(folder)}/"
    }


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
@pytest.mark.parametrize("command", COMMANDS)
def test_leaves_what_lies_beside_its_output(sources, tmp_path, monkeypatch, command, kind):
    monkeypatch.chdir(sources)
    place, elsewhere = tmp_path / "place", tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.mkdir()
    (elsewhere / "thesis").write_text("years of work")
    if command == "prepare again":
        assert main([*COMMANDS["prepare"], str(place / "out")]) == 0
    for suffix in SUFFIXES:
        for name in (f"out{suffix}", f".out{suffix}"):
            if (beside := place / name).exists():
                continue
            if kind == "link" and suffix != ".lock":
                beside.symlink_to(elsewhere)
            elif kind == "folder" and suffix != ".lock":
                beside.mkdir()
                (beside / "thesis").write_text("years of work")
            else:
                beside.write_text("years of work")
    before = state(place), state(elsewhere)
    assert main([*COMMANDS[command], str(place / "out")]) == 0
    found = state(place)
    if command.startswith("prepare"):  # which locks a file of this name, and leaves it as it is
        assert found.pop(".out.lock")[2] == before[0].pop(".out.lock")[2]
    assert (found, state(elsewhere)) == before
    assert (place / "out").is_dir() and not (place / "out" / "thesis").exists()


def test_overwrite_refuses_a_folder_that_holds_something_else(sources, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(sources)
    out = tmp_path / "out"
    assert main([*COMMANDS["prepare"], str(out)]) == 0
    (out / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert main([*COMMANDS["prepare again"], str(out)]) == 2
    assert "notes.txt" in capsys.readouterr().err
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "extension").mkdir()
    (tmp_path / "extension" / "manifest.json").write_text('{"name": "mine"}')
    assert main([*COMMANDS["prepare again"], str(tmp_path / "extension")]) == 2
    assert [path.name for path in (tmp_path / "extension").iterdir()] == ["manifest.json"]


def test_overwrites_what_a_link_leads_to_and_keeps_the_link(sources, tmp_path, monkeypatch):
    monkeypatch.chdir(sources)
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "data")
    (tmp_path / "disk" / "data").mkdir()
    for command in ("prepare", "prepare again"):
        assert main([*COMMANDS[command], str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").is_symlink() and (tmp_path / "out" / "train" / "index.json").is_file()
    assert [path.name for path in (tmp_path / "disk").iterdir() if not path.name.startswith(".")] == ["data"]
