"""Bytecode is kept in a folder of ours where the environment keeps none; elsewhere nothing changes."""

import importlib
import importlib.util
import os
import py_compile
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.bytecode import keep_bytecode
from llmtrain.errors import exit_status

MARSHAL = {40: ["marshal data too short"], None: ["bad marshal data (unknown type code)"]}
"""What Python says of bytecode, by the bytes of it that are there; None: zeros."""


@pytest.fixture
def torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a torch of which no bytecode is kept, in a Python that is told to write none."""
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def told() -> tuple[str | None, bool, str, str | None]:
    """What this Python is told of bytecode, and what those that it starts are."""
    names = os.environ["PYTHONPYCACHEPREFIX"], os.environ.get("PYTHONDONTWRITEBYTECODE")
    return sys.pycache_prefix, sys.dont_write_bytecode, *names


@pytest.mark.parametrize("told_by", ["a variable", "a read-only environment"])
def test_it_is_kept_for_this_process_and_those_that_it_starts(torch, tmp_path, monkeypatch, told_by):
    if told_by == "a read-only environment":
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) != torch)
    keep_bytecode()
    folder = tmp_path / "cache" / "llmtrain" / "bytecode"
    assert folder.is_dir()
    assert told() == (str(folder), False, str(folder), None)


@pytest.mark.parametrize("kept", ["beside", "by Python", "in a folder of the user's", "nowhere: there is no place"])
def test_nothing_changes_where(torch, tmp_path, monkeypatch, kept):
    if kept == "beside":
        (torch / "__pycache__").mkdir()
        Path(importlib.util.cache_from_source(str(torch / "__init__.py"))).touch()
    elif kept == "by Python":
        monkeypatch.setattr(sys, "dont_write_bytecode", False)
    elif kept == "in a folder of the user's":
        monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "theirs"))
    else:
        (tmp_path / "cache").touch()
    before = told()
    keep_bytecode()
    assert told() == before


@pytest.mark.parametrize("keep", [0, 10, 40, None], ids=["empty", "cut in its header", "cut", "zeros"])
def test_damaged_bytecode_is_made_anew_or_named(keep: int | None, tmp_path, monkeypatch):
    """As after a machine lost power. Python itself notices what is wrong with a header."""
    (tmp_path / "damaged_here.py").write_text("VALUE = [1, 2, 3]\n" * 50)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    file = Path(py_compile.compile(str(tmp_path / "damaged_here.py"), doraise=True) or "")
    content = file.read_bytes()
    file.write_bytes(content[:16] + bytes(len(content)) if keep is None else content[:keep])
    reported = list[BaseException]()
    status = exit_status(lambda: importlib.import_module("damaged_here") and 0, reported.append)
    sys.modules.pop("damaged_here", None)
    named = [f"{file}: {what}; remove this file, which Python makes anew" for what in MARSHAL.get(keep, [])]
    assert (status, [str(error) for error in reported]) == (2 if named else 0, named)
