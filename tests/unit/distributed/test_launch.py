"""The launcher of local ranks, with plain programs in the place of ranks."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmtrain.distributed.early_ranks import EarlyRanks
from llmtrain.distributed.launch import _kill, launch
from llmtrain.distributed.processes import LAUNCHER as LAUNCHER_VARIABLE
from llmtrain.distributed.processes import start_time

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
ENDS_WITH_LAUNCHER = """
from llmtrain.distributed.processes import end_with_launcher
end_with_launcher()
"""


def alive(pid: int) -> bool:
    return start_time(pid) is not None


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGUSR1, 138),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_ending_the_launcher_ends_the_ranks(tmp_path: Path, sent: signal.Signals, status: int):
    program = SLEEP if sent != signal.SIGKILL else ENDS_WITH_LAUNCHER + SLEEP
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, program, str(tmp_path / "run"), "60"],
        env={**os.environ, "NOTES": str(tmp_path)},
    )
    deadline = time.monotonic() + 300
    while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    process.send_signal(sent)
    assert process.wait(300) == status
    deadline = time.monotonic() + (30 if sent == signal.SIGKILL else 0)  # nobody waited for them
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def test_a_rank_whose_launcher_has_ended_before_it_began_ends_too():
    environment = {**os.environ, LAUNCHER_VARIABLE: "1"}
    rank = subprocess.run(
        [sys.executable, "-c", ENDS_WITH_LAUNCHER + "print('trains')"], env=environment, capture_output=True
    )
    assert (rank.returncode, rank.stdout) == (-signal.SIGKILL, b"")


def test_every_rank_succeeds_or_the_first_failure_is_the_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch([sys.executable, "-c", "print('fine')"], 3, str(tmp_path), 5.0) == 0
    fails_on_1 = "import os, sys; sys.exit('rank 1 says why' if os.environ['RANK'] == '1' else 0)"
    assert launch([sys.executable, "-c", fails_on_1], 3, str(tmp_path), 5.0) == 1
    assert "rank 1 says why" in capfd.readouterr().err


def test_a_rank_is_reported_whatever_ended_it_and_whatever_became_of_its_log(tmp_path: Path, capfd):
    ended = "import os; os.environ['RANK'] == '1' and os.kill(os.getpid(), 45)"
    assert launch([sys.executable, "-c", ended], 2, str(tmp_path)) == 128 + 45
    assert "rank 1 was killed by signal 45; the other ranks were stopped" in capfd.readouterr().err
    without_folder = f"import os, shutil; shutil.rmtree({str(tmp_path)!r}, ignore_errors=True); os._exit(3)"
    assert launch([sys.executable, "-c", without_folder], 2, str(tmp_path)) == 3


def test_a_rank_without_a_word_is_named_and_no_earlier_attempt_speaks_for_it(tmp_path: Path, capfd):
    """A full disk, say, takes no reason."""
    fails_on_1 = "import os, sys; os.environ['RANK'] == '1' and sys.exit({})"
    assert launch([sys.executable, "-c", fails_on_1.format("'the first reason'")], 2, str(tmp_path)) == 1
    assert "the first reason" in capfd.readouterr().err
    assert launch([sys.executable, "-c", fails_on_1.format(3)], 2, str(tmp_path), attempt=1) == 3
    said = capfd.readouterr().err
    assert "rank 1 ended with status 3, and" in said and "the first reason" not in said


@pytest.mark.parametrize("early", [False, True])
def test_a_rank_that_ends_with_status_0_before_it_is_done_is_named(
    early: bool, tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch
):
    """Of the others, which wait for it, none would ever say so."""
    monkeypatch.setattr("llmtrain.distributed.launch._ALONE_SECONDS", 0.5)
    program = """
import os, time
from llmtrain.distributed import early_ranks, world
if early_ranks.waits():
    early_ranks.await_admission()
if os.environ["RANK"] == "0":
    time.sleep({seconds})
elif {done}:
    world.exit_status_of_rank(lambda: 0, print)
"""
    for done, seconds, status in ((True, 3, 0), (False, 60, 1)):
        command = [sys.executable, "-c", program.format(done=done, seconds=seconds)]
        with EarlyRanks(command, 2) if early else contextlib.nullcontext() as ranks:
            assert launch(command, 2, str(tmp_path), early=ranks) == status
        said = capfd.readouterr().err
        assert ("rank 1 ended with status 0 before the end of the run" in said) is not done, said


FAULT = """
import faulthandler, os, signal, sys, threading, time
faulthandler.enable()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def innermost(): os.kill(os.getpid(), signal.SIGSEGV)
def around(depth): around(depth - 1) if depth else innermost()
around(40) if os.environ["RANK"] == "1" else time.sleep(60)
"""


def test_a_fault_in_c_code_is_shown_where_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert launch([sys.executable, "-c", FAULT], 2, str(tmp_path)) == 128 + signal.SIGSEGV
    killed, fault, thread, first, second, *_ = capfd.readouterr().err.splitlines()
    assert killed.startswith("rank 1 was killed by SIGSEGV") and fault == "Fatal Python error: Segmentation fault"
    assert thread.startswith("Current thread ") and first.endswith("in innermost") and second.endswith("in around")


def test_a_log_keeps_what_earlier_attempts_wrote_and_no_earlier_run(tmp_path: Path):
    for run in range(2):
        for attempt in range(2):
            assert launch([sys.executable, "-c", f"print({run}, {attempt})"], 2, str(tmp_path), attempt=attempt) == 0
        assert (tmp_path / "logs" / "rank1.txt").read_text() == f"{run} 0\n{run} 1\n"


SAVES = """
import os, pathlib, signal, sys, time
notes = pathlib.Path(os.environ["NOTES"])
def save(*_):
    time.sleep(1.5)
    (notes / ("saved" + os.environ["RANK"])).touch()
    sys.exit(int(os.environ.get("ENDS", "143")))
signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ.get("DEAF") else save)
(notes / os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""


def start(
    tmp_path: Path, grace_seconds: float, program: str = SAVES, **environment: str
) -> tuple[subprocess.Popen, list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, program, str(tmp_path / "run"), str(grace_seconds)],
        env=os.environ | {"NOTES": str(tmp_path)} | environment,
    )
    deadline = time.monotonic() + 300
    while not all((tmp_path / rank).is_file() and (tmp_path / rank).read_text() for rank in "01"):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return process, [int((tmp_path / rank).read_text()) for rank in "01"]


@pytest.mark.parametrize("by", ["the launcher", "every process", "the ranks", "the launcher twice, as `timeout` does"])
def test_preempted_ranks_have_time_to_save(tmp_path: Path, by: str):
    """Whether a job manager signals the launcher, everything, or only the ranks."""
    process, ranks = start(tmp_path, 60)
    targets = {"the launcher": [process.pid], "every process": [process.pid, *ranks], "the ranks": ranks}
    for pid in targets.get(by, [process.pid] * 2):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.3 if by not in targets else 0.0)
    assert process.wait(300) == 143
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


def test_ranks_that_end_well_after_a_signal_have_finished_the_run(tmp_path: Path):
    process, _ = start(tmp_path, 60, ENDS="0")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_that_do_not_end_are_ended_and_named(tmp_path: Path, signals: int, capfd: pytest.CaptureFixture[str]):
    """After the stated time, or at once by a second SIGTERM."""
    process, ranks = start(tmp_path, 2.0 if signals == 1 else 600.0, DEAF="1")
    began = time.monotonic()
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(2.5)
    assert process.wait(300) == 143
    assert signals == 2 or time.monotonic() - began >= 2
    when = "2.5 s after SIGTERM" if signals == 1 else "before a second SIGTERM"
    assert f"ranks 0, 1 had not ended {when}: killed" in capfd.readouterr().err
    assert not any(alive(pid) for pid in ranks)


DIES_AS_IT_SAVES = """
import os, pathlib, signal, time
notes, rank = pathlib.Path(os.environ["NOTES"]), os.environ["RANK"]
signal.signal(signal.SIGTERM, (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if rank == "1" else signal.SIG_IGN)
(notes / rank).write_text(str(os.getpid()))
time.sleep(200)
"""


def test_ranks_do_not_wait_for_one_that_dies_as_it_saves(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    process, ranks = start(tmp_path, 150.0, program=DIES_AS_IT_SAVES)
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 143
    first, second = capfd.readouterr().err.splitlines()[-2:]
    assert first.startswith("rank 1 was killed by SIGKILL")
    assert second.startswith(
        "rank 0 had not ended 0.5 s after that: killed; what was trained since the newest checkpoint"
    )
    assert not any(alive(pid) for pid in ranks)


class Stuck:
    """A process that waits in the kernel, and so ends long after it was killed."""

    pid, waited = 12, 0

    def kill(self) -> None:
        pass

    def wait(self, seconds: float | None = None) -> None:
        self.waited += 1
        if seconds is not None:
            raise subprocess.TimeoutExpired("rank", seconds)


def test_a_killed_process_that_does_not_end_is_named(capfd: pytest.CaptureFixture[str]):
    stuck: Any = Stuck()
    _kill([stuck])
    assert stuck.waited == 2
    assert capfd.readouterr().err.startswith("process 12 was killed and does not end: a device or a file system")


LISTENS = """
import os, pathlib, torch.distributed as dist
from llmtrain.distributed.world import initialize
initialize()
total = [None] * dist.get_world_size()
dist.all_gather_object(total, os.environ["MASTER_PORT"])
own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
listening = []
for kind in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", kind).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            listening.append(fields[1])
dist.barrier()
pathlib.Path(os.environ["NOTES"], os.environ["RANK"]).write_text(" ".join([total[0], *listening]))
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_launches_at_once_meet_at_ports_of_their_own_and_listen_on_loopback_alone(tmp_path: Path):
    places = [tmp_path / str(number) for number in range(2)]
    processes = []
    for place in places:
        place.mkdir()
        command = [sys.executable, "-c", LAUNCHER, LISTENS, str(place / "run"), "60"]
        processes.append(subprocess.Popen(command, env={**os.environ, "NOTES": str(place)}))
    assert [process.wait(300) for process in processes] == [0, 0]
    ports = set()
    for place in places:
        for rank in "01":
            port, *listening = (place / rank).read_text().split()
            assert all(address.startswith("0100007F:") for address in listening), listening
            ports.add(port)
        assert f"0100007F:{int((place / '0').read_text().split()[0]):04X}" in (place / "0").read_text()
    assert len(ports) == 2


def test_a_lone_process_listens_nowhere(tmp_path: Path):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    subprocess.run(
        [sys.executable, "-c", LISTENS], env={**environment, "NOTES": str(tmp_path)}, check=True, timeout=300
    )
    _, *listening = (tmp_path / "0").read_text().split()
    assert all(address.startswith("0100007F:") for address in listening)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_rank_that_saved_and_ended_by_a_signal_of_its_own_leaves_the_others_time_to_save(tmp_path: Path, number: int):
    program = f"""
import os, pathlib, signal, sys, time
notes = pathlib.Path({str(tmp_path)!r})
def save(*_):
    time.sleep(0.5)
    (notes / "saved").touch()
    sys.exit({128 + number})
signal.signal({int(number)}, save)
(notes / os.environ["RANK"]).touch()
while not (notes / "1").exists():
    time.sleep(0.02)
os._exit({128 + number}) if os.environ["RANK"] == "0" else time.sleep(60)
"""
    assert launch([sys.executable, "-c", program], 2, str(tmp_path / "run"), 30.0) == 128 + number
    assert (tmp_path / "saved").exists()
