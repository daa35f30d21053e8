"""`llmtrain doctor` reports a wrong file of the user's on any machine."""

import os
from pathlib import Path

import pytest

from llmtrain.doctor.selftest import check
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
    ("name", "said"), [("sm90.yaml", "sm90.yaml"), ("sm90.attention.csv", "sm90.attention.csv, line 2: ")]
)
def test_rejects_a_wrong_file_where_it_would_be_read_and_without_a_gpu(folder: Path, name: str, said: str):
    check(CPU)
    (folder / name).write_text("backend,window\ngarbage,row\n")
    tuning.forget()
    check(A100)
    for where in (CPU, H200):
        with pytest.raises(UserError, match=said):
            check(where)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"backend,window\n\xff\xfe", "cannot read the measured attention .*utf-8"),
        (
            b"a,b\n" + b"x" * 200_000,
            "field larger than field limit|line 2: dtype: Field required",
        ),  # csv's limit is the process's
        (b"#" * (4 << 20) + b"#", "longer than 4,194,304 bytes"),
        (b"backend,window\na,1,2\n", "line 2: more values than the first line has names"),
        (None, "not a regular file"),
    ],
    ids=["bytes", "a long field", "a long file", "more values", "a pipe"],
)
def test_rejects_measured_attention_that_is_no_table(folder: Path, content: bytes | None, said: str):
    file = folder / "sm90.attention.csv"
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    with pytest.raises(UserError, match=said):
        check(H200)


def test_rejects_a_named_file_that_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMTRAIN_TUNING", str(folder / "none.yaml"))
    with pytest.raises(UserError, match=r"none\.yaml, which does not exist"):
        check(CPU)
