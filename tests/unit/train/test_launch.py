"""The launcher of local ranks, with plain programs in the place of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.train.launch import launch

LAUNCHER = """
import sys
from llmtrain.train.launch import launch
sys.exit(launch([sys.executable, "-c", sys.argv[1]], 2, sys.argv[2]))
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
        [sys.executable, "-c", LAUNCHER, SLEEP, str(tmp_path / "run")], env={**os.environ, "NOTES": str(tmp_path)}
    )
    deadline = time.monotonic() + 20
    while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    process.send_signal(sent)
    assert process.wait(20) == status
    assert not any(alive(pid) for pid in pids)


def test_every_rank_succeeds_or_the_first_failure_is_the_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch([sys.executable, "-c", "print('fine')"], 3, str(tmp_path)) == 0
    fails_on_1 = "import os, sys; sys.exit('rank 1 says why' if os.environ['RANK'] == '1' else 0)"
    assert launch([sys.executable, "-c", fails_on_1], 3, str(tmp_path)) == 1
    assert "rank 1 says why" in capfd.readouterr().err
