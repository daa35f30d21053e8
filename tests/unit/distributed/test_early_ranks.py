"""Ranks that begin before their launcher knows the run, with plain programs in the place of ranks."""

import signal
import sys
import time
from pathlib import Path

import pytest

from llmtrain.commands.processes import probable_processes
from llmtrain.distributed.early_ranks import EarlyRanks, waits
from llmtrain.distributed.launch import launch
from llmtrain.distributed.processes import start_time
from llmtrain.distributed.run_lock import RunLock
from llmtrain.distributed.world import LISTENER

WAITS = """
import os, pathlib
notes = pathlib.Path(os.environ["NOTES"])
from llmtrain.commands.processes import probable_processes
from llmtrain.distributed.early_ranks import await_admission, waits
assert waits()
(notes / f"waits{os.environ['RANK']}").touch()
await_admission()
print("admitted", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


def await_ranks(notes: Path, early: EarlyRanks) -> None:
    deadline = time.monotonic() + 60
    while not all((notes / f"waits{rank}").exists() for rank in range(len(early.waiting))):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.02)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NOTES", str(tmp_path))
    return tmp_path


def test_admitted_ranks_have_what_a_rank_has_that_begins_later(notes: Path, capfd: pytest.CaptureFixture[str]):
    """Its environment, output, the folder's lock, and in rank 0 the socket that listens where the others come."""
    program = f"""{WAITS}
import socket
if os.environ["RANK"] == "0":
    with socket.socket(fileno=int(os.environ["{LISTENER}"])) as listener:
        print("heard", listener.accept()[0].recv(9))
else:
    socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).send(b"rank 1")
    held = [os.path.realpath(f"/proc/self/fd/{{one}}") for one in os.listdir("/proc/self/fd")]
    print("holds the lock:", any(one.endswith("lock.json") for one in held))
"""
    run = notes / "run"
    with EarlyRanks([sys.executable, "-c", program], 2) as early, RunLock(run) as lock:
        first = {process.pid for process, _ in early.waiting}
        assert len(first) == 2
        assert launch(early.command, 2, str(run), lock=lock, early=early) == 0
        assert early.waiting == []
        assert capfd.readouterr().out == "admitted 0 0\nheard b'rank 1'\n"
        assert (run / "logs" / "rank1.txt").read_text() == "admitted 1 0\nholds the lock: True\n"


def test_ranks_that_are_not_admitted_end_without_a_word(notes: Path, capfd: pytest.CaptureFixture[str]):
    with EarlyRanks([sys.executable, "-c", WAITS], 2) as early:
        await_ranks(notes, early)
        pids = [process.pid for process, _ in early.waiting]
        assert all(start_time(pid) for pid in pids)
    assert not any(start_time(pid) for pid in pids)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_ended_while_it_waited_is_reported(notes: Path, capfd: pytest.CaptureFixture[str]):
    with EarlyRanks([sys.executable, "-c", WAITS], 2) as early:
        await_ranks(notes, early)
        early.waiting[1][0].kill()
        early.waiting[1][0].wait()
        assert launch(early.command, 2, str(notes / "run"), early=early) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in capfd.readouterr().err


def test_a_signal_to_all_processes_reaches_a_rank_only_once_it_is_admitted(notes: Path):
    with EarlyRanks([sys.executable, "-c", WAITS + "import time; time.sleep(60)"], 2) as early:
        await_ranks(notes, early)
        ranks = [process for process, _ in early.waiting]
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert [process.poll() for process in ranks] == [None, None]
        assert launch(early.command, 2, str(notes / "run"), early=early) == 143


def test_one_process_starts_no_other():
    with EarlyRanks(["false"], 1) as early:
        assert early.waiting == []
    assert not waits()


@pytest.mark.parametrize(
    ("nproc", "visible", "files", "expected"),
    [(3, "0", 8, 3), (None, None, 8, 8), (None, "0,2", 8, 2), (None, "", 8, 1), (None, None, 0, 0)],
)
def test_the_probable_number_of_processes(monkeypatch: pytest.MonkeyPatch, nproc, visible, files, expected):
    monkeypatch.setattr(
        "llmtrain.commands.processes.glob", lambda _: [f"/dev/nvidia{number}" for number in range(files)]
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert probable_processes(nproc) == expected
