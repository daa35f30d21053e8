"""SIGTERM while a run starts: status 143 at once, whatever the process is doing, and the run's folder is free."""

import signal
import subprocess
import sys

import pytest

from llmtrain.train.faults.early_sigterm import ended_by_sigterm, handlers_kept

PROGRAM = """
import ctypes, sys, time
from llmtrain.distributed.run_lock import RunLock
from llmtrain.train.faults.early_sigterm import ended_by_sigterm
with ended_by_sigterm():
    RunLock(sys.argv[1])
    print("ready", flush=True)
    if sys.argv[2] == "in Python":
        while True:
            time.sleep(0.01)
    mutex = ctypes.create_string_buffer(256)
    while True:  # a wait that a signal does not interrupt, as for other ranks
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("where", ["in Python", "in C"])
def test_it_ends_the_process_with_143_and_frees_the_folder(tmp_path, where):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 143
    assert text == "SIGTERM: ending; there is nothing to save\n"
    assert list(tmp_path.iterdir()) == []


def test_another_handler_takes_over_and_afterwards_all_is_as_before():
    heard = []
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm():
        ours = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, ours)
    assert heard == [True]
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_library_that_is_imported_installs_no_handler():
    before = signal.getsignal(signal.SIGTERM)
    with handlers_kept():
        assert signal.signal(signal.SIGTERM, signal.SIG_IGN) == before
    assert signal.getsignal(signal.SIGTERM) == before
    signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, signal.SIG_IGN))  # which works again
