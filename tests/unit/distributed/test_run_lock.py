"""The lock of a run's folder: who holds it, when a lock is stale, and that one of many starts gets it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.distributed import run_lock
from llmtrain.distributed.run_lock import NAME, Holder, RunHeldError, RunLock

PROGRAM = """
import sys, time
from llmtrain.distributed import run_lock
run_lock._RENEWAL_SECONDS = 0.05
if sys.argv[2] == "without flock":
    run_lock._flock = lambda descriptor: "unsupported"
try:
    lock = run_lock.RunLock(sys.argv[1])
except run_lock.RunHeldError as error:
    print("refused", flush=True)
    sys.exit(2)
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "_PATIENCE_SECONDS", 0.3)


@pytest.fixture(params=["flock", "without flock"])
def flock(request, monkeypatch) -> str:
    """Both kinds of file system."""
    if request.param == "without flock":
        monkeypatch.setattr(run_lock, "_flock", lambda descriptor: "unsupported")
    return request.param


def start(folder: Path, flock: str = "flock") -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), flock], stdin=pipe, stdout=pipe, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> int:
    process.communicate("", timeout=60)
    return process.returncode


def set_time(path: Path, seconds_ago: float) -> None:
    moment = time.time() - seconds_ago
    os.utime(path, (moment, moment))


def write(folder: Path, silent: Any = 0.0, **changes: Any) -> Path:
    """A lock as another process may have left it, last renewed so many seconds ago."""
    holder = Holder.of_this_process("another", flock=True)
    path = folder / NAME
    path.write_text(json.dumps(holder.__dict__ | changes))
    set_time(path, silent)
    return path


def test_a_held_folder_is_refused_with_what_holds_it_and_is_free_afterwards(tmp_path, flock, monkeypatch):
    folder = tmp_path / "run"
    with RunLock(folder):
        before = (folder / NAME).read_bytes()
        monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: pytest.fail("it waits"))
        with pytest.raises(
            RunHeldError, match=f"run is held by process {os.getpid()} on .*, since 20.*choose another name"
        ):
            RunLock(folder)
        assert (folder / NAME).read_bytes() == before
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    RunLock(folder).release()


def test_a_folder_in_which_nothing_was_written_is_removed_again(tmp_path):
    RunLock(tmp_path / "run").release()
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    RunLock(tmp_path / "mine").release()
    assert (tmp_path / "mine").exists()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, flock):
    process = start(tmp_path, flock)
    assert answer(process) == "held"
    with pytest.raises(RunHeldError, match=f"process {process.pid}"):
        RunLock(tmp_path)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie does not hold a folder either
    with RunLock(tmp_path) as lock:
        assert Holder.parse((tmp_path / NAME).read_bytes()) == lock.holder
    process.communicate()


def test_a_process_that_has_the_id_of_an_ended_one_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_flock", lambda descriptor: "unsupported")
    write(tmp_path, started=1)
    RunLock(tmp_path).release()
    write(tmp_path)
    with pytest.raises(RunHeldError):
        RunLock(tmp_path)


@pytest.mark.parametrize("stale", [True, False], ids=["a stale lock", "no lock"])
def test_of_many_starts_at_once_one_gets_the_folder(tmp_path, flock, stale):
    if stale:
        write(tmp_path, pid=2**22 + 1)
    processes = [start(tmp_path, flock) for _ in range(5)]
    answers = [answer(process) for process in processes]
    assert sorted(answers) == ["held"] + ["refused"] * 4
    assert sorted(finish(process) for process in processes) == [0, 2, 2, 2, 2]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("silent", "died"), [(1, False), (600, True)])
def test_the_lock_of_another_machine_explains_how_to_take_over(tmp_path, flock, silent, died):
    path = write(tmp_path, silent, host="elsewhere", boot="another")
    before = path.read_bytes()
    with pytest.raises(RunHeldError) as error:
        RunLock(tmp_path)
    text = str(error.value)
    assert f"is held by process {os.getpid()} on elsewhere, since" in text
    assert ("last renewed its lock 10 min ago: it has probably died" in text) == died
    assert text.endswith(f"Once it has ended, take over: delete {path} and start again")
    assert path.read_bytes() == before
    path.unlink()
    RunLock(tmp_path).release()


def test_a_job_that_its_manager_has_put_back_goes_on_elsewhere(tmp_path, monkeypatch):
    """SLURM, and torchrun, start a job again once all of its processes have ended."""
    there: dict[str, Any] = {"host": "elsewhere", "boot": "another", "job": "SLURM:4711", "attempt": [0, 1]}
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    write(tmp_path, **there)
    with pytest.raises(RunHeldError, match="on elsewhere, SLURM job 4711, since"):
        RunLock(tmp_path)
    for name, value in (("LLMTRAIN_RESTART", "2"), ("SLURM_RESTART_COUNT", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            RunLock(tmp_path).release()
            write(tmp_path, **there)
    write(tmp_path, **(there | {"job": "SLURM:4712"}))
    with pytest.raises(RunHeldError):
        RunLock(tmp_path)


def test_a_machine_that_was_started_again_holds_nothing(tmp_path, flock, impatient):
    write(tmp_path, silent=1, boot="before")
    with pytest.raises(RunHeldError):  # a clone of the machine may have the same name
        RunLock(tmp_path)
    write(tmp_path, silent=60, boot="before")
    RunLock(tmp_path).release()


def test_another_container_on_this_machine_holds_the_folder_as_long_as_its_flock(tmp_path, monkeypatch):
    write(tmp_path, namespace="another", pid=1)
    RunLock(tmp_path).release()
    write(tmp_path, namespace="another", pid=1)
    monkeypatch.setattr(run_lock, "_flock", lambda descriptor: "another's")
    with pytest.raises(RunHeldError):
        RunLock(tmp_path)


@pytest.mark.parametrize("content", ["", '{"launch": "abc", "ho', "[]"])
def test_a_lock_that_cannot_be_read_is_taken_over_once_nothing_renews_it(tmp_path, flock, impatient, content):
    (tmp_path / NAME).write_text(content)
    with pytest.raises(RunHeldError, match=r"lock.json cannot be read. If no run trains there, delete that file"):
        RunLock(tmp_path)
    set_time(tmp_path / NAME, 60)
    RunLock(tmp_path).release()


def test_ranks_that_outlive_their_launcher_hold_the_folder(tmp_path, monkeypatch):
    launcher = (
        "import os, subprocess, sys\nfrom llmtrain.distributed.run_lock import RunLock\nlock = RunLock(sys.argv[1])\n"
        "subprocess.Popen(['sleep', sys.argv[2]], pass_fds=(lock.descriptor,))\nos.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", launcher, str(tmp_path), "3"])
    with monkeypatch.context() as patch:
        patch.setattr(run_lock, "_PATIENCE_SECONDS", 0.3)
        with pytest.raises(RunHeldError, match="that has ended, but processes that it started still run"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()  # it waits a little


def test_a_run_whose_folder_was_taken_over_ends_without_saving(tmp_path):
    process = start(tmp_path)
    assert answer(process) == "held"
    (tmp_path / NAME).unlink()
    with RunLock(tmp_path):
        assert process.wait(60) == 1
        assert (tmp_path / NAME).exists()
    process.communicate()


def test_a_folder_set_aside_is_free_and_the_new_one_held(tmp_path, flock):
    folder, aside = tmp_path / "run", tmp_path / "run.before"
    folder.mkdir()
    (folder / "old").touch()
    with RunLock(folder) as lock:
        lock.move_aside(aside)
        assert [path.name for path in folder.iterdir()] == [NAME]
        assert [path.name for path in aside.iterdir()] == ["old"]
        with pytest.raises(RunHeldError):
            RunLock(folder)
    assert not folder.exists()


def test_a_forked_process_releases_nothing(tmp_path):
    with RunLock(tmp_path):
        child = os.fork()
        if not child:
            run_lock.release_all()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(RunHeldError):
            RunLock(tmp_path)


def test_a_lock_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / NAME).symlink_to("/nowhere/else")
    with pytest.raises(run_lock.RunError, match="is a link to /nowhere/else, which does not exist"):
        RunLock(tmp_path)


def test_a_folder_that_cannot_be_made_is_no_fault_of_the_program(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(run_lock.RunError, match=r"lock.json cannot be written: "):
        RunLock(tmp_path / "file" / "run")
