"""The parts of a start: what is logged of them, and what is written."""

import gc
import json
import time
from pathlib import Path

import pytest

from llmtrain import start


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(start, "_start", None)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("rank", "seconds", "reported"), [(0, 0.5, True), (0, 10.0, False), (1, 0.0, False)])
def test_long_parts_are_reported_with_their_seconds_by_rank_0(capsys, monkeypatch, rank, seconds, reported):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(start, "REPORTED_PHASE", seconds and seconds - 0.5)
    with start.import_phase("imports"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert capsys.readouterr().err == ("start: imports  0.0 s\n" if reported else "")


def test_a_part_that_lasts_is_reported_meanwhile_and_the_innermost_alone(capsys, monkeypatch):
    monkeypatch.setattr(start, "REPORT_INTERVAL", 0.05)
    with start.start_phase("imports"), start.start_phase("model"):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("start: model ...  0 s so far") >= 2 and not any("imports" in line for line in lines)


def test_parts_add_up_to_the_time_since_the_command(monkeypatch):
    monkeypatch.setattr(start, "age", lambda pid: 5.0)
    with start.start_phase("outer"):
        time.sleep(0.02)
        with start.start_phase("inner"):
            time.sleep(0.04)
    parts = start.end_start()
    assert list(parts) == ["other: Python, the config, checks", "inner", "outer"]
    assert sum(parts.values()) == pytest.approx(5.06, abs=0.05) and 0.02 <= parts["outer"] < parts["inner"]
    assert start.table({"a": 1.5, "b": 0.25, "c": 0.01}) == [
        "start: 1.8 s from the command to the end of the first step",
        "start:      1.5 s  a",
        "start:      0.2 s  b",
    ]
    assert sum(start.end_start().values()) < 1  # the next start in this process


def test_a_ranks_start_begins_with_its_launchers(monkeypatch):
    monkeypatch.setenv(start.LAUNCHER, "1")
    monkeypatch.setattr(start, "age", lambda pid: 5.0 if pid == 1 else 2.0)
    parts = start.end_start()
    assert parts["launcher, before the ranks begin"] == 3.0
    assert parts["other: Python, the config, checks"] == pytest.approx(2.0, abs=0.5)


def test_a_part_that_fails_is_over(monkeypatch):
    with pytest.raises(ValueError), start.start_phase("model"):
        raise ValueError
    assert start._now().open == []


def test_describe_has_the_cost_of_a_start(tmp_path: Path):
    run = tmp_path / "runs" / "mine"
    assert start.cost_of_start(run) == f"not known before a first one, which {run / 'start.json'} will hold"
    other = tmp_path / "runs" / "other"
    other.mkdir(parents=True)
    start.write_start(other, {"a": 20.0, "b": 4.4})
    assert start.cost_of_start(run) == f"an estimate: 24 s to the end of the first step (20 s a, 4 s b) in {other}"
    run.mkdir()
    start.write_start(run, {"a": 2.0})
    assert start.cost_of_start(run).startswith("2 s to the end of the first step (2 s a), on 20")
    for damaged in (
        [],
        {"seconds": 2.0, "parts": [], "finished": ""},
        {"seconds": 2.0, "parts": {"a": "b"}, "finished": ""},
    ):
        (run / "start.json").write_text(json.dumps(damaged))
        assert start.cost_of_start(run).startswith("an estimate: 24 s")
