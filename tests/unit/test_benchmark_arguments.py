"""Settings on the command line of a benchmark, in any place."""

import argparse

import pytest

from benchmarks.arguments import parse


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
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--lengths", type=int, nargs="+")
    args = parse(parser, line.split())
    assert vars(args) == {"file": "run.yaml", "overrides": ["a.b=c", "d=[1,2]"], "nproc": 2, "lengths": [64, 128]}
