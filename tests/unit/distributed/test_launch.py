"""The launcher of local ranks, with plain programs in the place of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.distributed.launch import launch

LAUNCHER = """
import sys
from llmtrain.distributed import launch
launch._EXIT_SECONDS = 0.5
sys.exit(launch.launch([sys.executable, "-c", sys.argv[1]], 2, sys.argv[2], float(sys.argv[3])))
"""
SLEEP = """
import os, pathlib, time
pathlib.Path(os.environ["NOTES"], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_ending_the_launcher_ends_the_ranks(tmp_path: Path, sent: signal.Signals, status: int):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SLEEP, str(tmp_path / "run"), "60"], env={**os.environ, "NOTES": str(tmp_path)}
    )
    deadline = time.monotonic() + 300
    while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    process.send_signal(sent)
    assert process.wait(300) == status
    assert not any(alive(pid) for pid in pids)


def test_every_rank_succeeds_or_the_first_failure_is_the_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch([sys.executable, "-c", "print('fine')"], 3, str(tmp_path), 5.0) == 0
    fails_on_1 = "import os, sys; sys.exit('rank 1 says why' if os.environ['RANK'] == '1' else 0)"
    assert launch([sys.executable, "-c", fails_on_1], 3, str(tmp_path), 5.0) == 1
    assert "rank 1 says why" in capfd.readouterr().err


SAVES = """
import os, pathlib, signal, sys, time
notes = pathlib.Path(os.environ["NOTES"])
def save(*_):
    time.sleep(1.5)
    (notes / ("saved" + os.environ["RANK"])).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("DEAF") else save)
(notes / os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def start(tmp_path: Path, grace_seconds: float, **environment: str) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SAVES, str(tmp_path / "run"), str(grace_seconds)],
        env=os.environ | {"NOTES": str(tmp_path)} | environment,
    )
    deadline = time.monotonic() + 300
    while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return process, [int((tmp_path / rank).read_text()) for rank in "01"]


@pytest.mark.parametrize("by", ["the launcher", "every process", "the ranks"])
def test_preempted_ranks_have_time_to_save(tmp_path: Path, by: str):
    """Whether a job manager signals the launcher, everything, or only the ranks."""
    process, ranks = start(tmp_path, 60)
    targets = {"the launcher": [process.pid], "every process": [process.pid, *ranks], "the ranks": ranks}[by]
    for pid in targets:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(300) == 143
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_that_do_not_end_are_ended(tmp_path: Path, signals: int):
    """After the stated time, or at once by a second SIGTERM."""
    process, ranks = start(tmp_path, 2.0 if signals == 1 else 600.0, DEAF="1")
    began = time.monotonic()
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
    assert process.wait(300) == 143
    assert signals == 2 or time.monotonic() - began >= 2
    assert not any(alive(pid) for pid in ranks)
