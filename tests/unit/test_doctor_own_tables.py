"""`llmtrain doctor` tells of a wrong file of the user's on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.doctor.own_tables import check
from llmtrain.errors import UserError
from llmtrain.kernels import tuning
from llmtrain.kernels.platform import Platform

CPU = Platform("cpu", "cpu", "a CPU", 8 << 30)
H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the user's files, which are read anew."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("LLMTRAIN_TUNING", raising=False)
    tuning.forget()
    found = tmp_path / "llmtrain" / "tuning"
    found.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("name", "said"),
    [("sm90.yaml", "sm90.yaml"), ("sm90.attention.csv", "sm90.attention.csv, line 2: ")],
)
def test_a_wrong_file_is_told_where_it_would_be_read_and_without_a_gpu(folder: Path, name: str, said: str):
    check(CPU)
    (folder / name).write_text("backend,window\ngarbage,row\n")
    tuning.forget()
    check(A100)
    for where in (CPU, H200):
        with pytest.raises(UserError, match=said):
            check(where)


def test_a_named_file_that_is_missing_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMTRAIN_TUNING", str(folder / "none.yaml"))
    with pytest.raises(UserError, match=r"none\.yaml, which does not exist"):
        check(CPU)
