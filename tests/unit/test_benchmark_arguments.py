"""`python -m benchmarks NAME`: --help, and bad arguments refused before anything is computed; settings stand anywhere."""

import argparse
import subprocess
import sys

import pytest

from benchmarks.__main__ import PROGRAMS, main
from benchmarks.harness.arguments import Parser, natural, number, positive
from llmtrain.errors import UserError


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_answers_help_and_refuses_an_unknown_option(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: python -m benchmarks {name}")
    with pytest.raises(SystemExit) as ended:
        main([name, "--no-such-option", "3"])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "kept OUT --gpus 0 --case a.yaml 2048 1 1",
        "automatic run.yaml --sweep none:1 --out out.json --steps 0",
        "convergence run.yaml --out OUT --seconds -1",
        "parallel run.yaml --nproc 1.5",
        "prepare --workers 0",
        "serving a.yaml --out OUT --batch 0",
    ],
)
def test_a_number_out_of_range_is_refused(line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert "expected a positive" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["overhead", "steps", "decoding"])
def test_a_config_that_is_not_there_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="no-such-file"):
        main([name, str(tmp_path / "no-such-file.yaml")])


def test_programs_are_listed_and_a_wrong_name_is_corrected(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in PROGRAMS) and "None" not in listed
    assert main([]) == 2
    with pytest.raises(UserError, match="is it overhead"):
        main(["overhed"])
    done = subprocess.run([sys.executable, "-m", "benchmarks", "nothing"], capture_output=True, text=True)
    assert done.returncode == UserError.status and "no such program" in done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "run.yaml a.b=c d=[1,2] --lengths 64 128 --nproc 2",
        "run.yaml --nproc 2 --lengths 64 128 a.b=c d=[1,2]",
        "a.b=c --lengths 64 128 --nproc 2 run.yaml d=[1,2]",
        "--nproc 2 run.yaml a.b=c --lengths 64 d=[1,2] 128",
    ],
)
def test_settings_may_stand_anywhere(line):
    parser = Parser("benchmarks.programs.kind.name", "What it does.", config=True)
    parser.add_argument("--nproc", type=positive)
    parser.add_argument("--lengths", type=natural, nargs="+")
    args = parser.parse(line.split())
    assert vars(args) == {"file": "run.yaml", "overrides": ["a.b=c", "d=[1,2]"], "nproc": 2, "lengths": [64, 128]}


def test_numbers_are_checked():
    assert (natural("0"), positive("3"), number("0.5")) == (0, 3, 0.5)
    for kind, text in (
        (natural, "-1"),
        (natural, "1.5"),
        (positive, "0"),
        (number, "0"),
        (number, "inf"),
        (number, "x"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a"):
            kind(text)
