"""The parts of a start: what is logged of them, and what is written."""

import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain import start


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(start, "_start", None)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The present time, which the test moves."""
    now = [100.0]
    monkeypatch.setattr(start, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize(("rank", "seconds", "reported"), [(0, 0.5, True), (0, 10.0, False), (1, 0.0, False)])
def test_long_parts_are_reported_with_their_seconds_by_rank_0(capsys, monkeypatch, rank, seconds, reported):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(start, "REPORTED_PHASE", seconds and seconds - 0.5)
    with start.import_phase("imports"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert capsys.readouterr().err == ("start: imports  0.0 s\n" if reported else "")


def test_a_part_that_lasts_is_reported_meanwhile_and_the_innermost_alone(monkeypatch):
    said = list[str]()
    monkeypatch.setattr(start, "REPORT_INTERVAL", 0.05)
    monkeypatch.setattr(start.log, "info", said.append)
    deadline = time.monotonic() + 100
    with start.start_phase("imports"), start.start_phase("model"):
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(said) >= 2 and all(line.startswith("start: model ...  ") for line in said[:2])
    assert not any("imports ..." in line for line in said)


def test_parts_add_up_to_the_time_since_the_command(monkeypatch, clock):
    monkeypatch.setattr(start, "age", lambda pid: 5.0)
    with start.start_phase("outer"):
        clock[0] += 1.0
        with start.start_phase("inner"):
            clock[0] += 2.0
    parts = start.end_start()
    assert list(parts.items()) == [("other: Python, the config, checks", 5.0), ("inner", 2.0), ("outer", 1.0)]
    assert start.table({"a": 1.5, "b": 0.25, "c": 0.01}) == [
        "start: 1.8 s from the command to the end of the first step",
        "start:      1.5 s  a",
        "start:      0.2 s  b",
    ]
    assert sum(start.end_start().values()) == 0  # the next start in this process


def test_a_ranks_start_begins_with_its_launchers(monkeypatch, clock):
    monkeypatch.setenv(start.LAUNCHER, "1")
    monkeypatch.setattr(start, "age", lambda pid: 5.0 if pid == 1 else 2.0)
    parts = start.end_start()
    assert parts["launcher, before the ranks begin"] == 3.0
    assert parts["other: Python, the config, checks"] == 2.0


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


def test_ranks_that_start_again_count_from_then_on(monkeypatch):
    monkeypatch.setenv(start.LAUNCHER, "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(start, "age", lambda pid: 5000.0 if pid == 1 else 2.0)
    assert sum(start.end_start().values()) == pytest.approx(2.0, abs=0.5)
