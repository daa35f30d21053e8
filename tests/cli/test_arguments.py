"""Arguments that every command refuses alike."""

import argparse
import getpass
import os
from pathlib import Path

import pytest

from llmtrain.cli import main, parser


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", ""],
        ["checkpoint", "ls", ""],
        ["export", "", "out"],
        ["generate", "", "--prompt", "a"],
        ["prepare", "stdlib", "--vocab-size", "300", "--seq-len", "8", "--out", ""],
    ],
)
def test_an_empty_argument_is_not_this_folder(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "one of the arguments is empty" in capsys.readouterr().err


def test_every_option_of_prepare_that_cannot_be_taken_is_named(capsys):
    arguments = ["prepare", "x", "--out", "y", "--tokenizer", "z", "--compression", "gzip", "--no-eos-token"]
    assert main(arguments) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["--no-eos-token", "--compression"]


def test_an_empty_prompt_is_one(capsys):
    assert main(["generate", "/nowhere", "--prompt", ""]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_a_user_without_an_entry_in_passwd_has_a_name_and_a_home(monkeypatch):
    """As of `docker run -u 12345`: torch asks for it, for the folder of its cache."""
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert getpass.getuser() == "uid-3999999999"
    assert Path.home() == Path("/")


def _commands(parser, words=()):
    yield words
    for action in parser._actions:
        for name, below in (action.choices if isinstance(action, argparse._SubParsersAction) else {}).items():
            yield from _commands(below, (*words, name))


@pytest.mark.parametrize(
    ("load", "given", "spins"),
    [
        (99.0, {}, "1000"),
        (0.0, {}, None),
        (99.0, {"GOMP_SPINCOUNT": "7"}, "7"),
        (99.0, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_wait_asleep_where_others_use_the_cores(load, given, spins, monkeypatch):
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    monkeypatch.setattr(os, "environ", found := kept | given)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert main(["generate", "/nowhere", "--prompt", ""]) == 2
    assert found.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize("words", list(_commands(parser())), ids=" ".join)
def test_help_of_a_command_is_its_own(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {' '.join(['llmtrain', *words])} [-h]")
