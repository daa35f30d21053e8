"""SIGTERM or Ctrl-C on one rank: its effect on all, the second signal, the time limit."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from llmtrain.distributed.world import free_port, initialize, rank_environment
from llmtrain.train.faults.preemption import Preemption


def take_steps(signalled_rank: int, at: int, number: int) -> tuple[list[bool], int]:
    with Preemption(60) as preemption:
        found = []
        for step in range(6):
            if step == at and dist.get_rank() == signalled_rank:
                os.kill(os.getpid(), number)
            found.append(preemption.signalled())
    return found, preemption.number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_the_signal_takes_effect_on_all_ranks_one_step_later(ranks, signalled_rank, number):
    before = signal.getsignal(number)
    expected = [False, False, False, True, True, True], int(number)
    assert ranks(2).run(take_steps, signalled_rank, 2, number) == [expected] * 2
    assert signal.getsignal(number) == before


def hang(note: Path, grace_seconds: float) -> None:
    """A rank whose step never ends."""
    os.environ.update(rank_environment(0, 1, free_port()))
    initialize()
    with Preemption(grace_seconds):
        note.touch()
        while True:
            time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("grace_seconds", "at"),
    [
        pytest.param(1.0, [0.0], id="the time limit"),
        pytest.param(600.0, [0.0, 0.1, 3.0, 6.0], id="a second signal, and one that is an echo"),
    ],
)
def test_it_ends_by_itself(tmp_path, grace_seconds, at, number):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llmtrain.train.run"])
    process = context.Process(target=hang, args=(tmp_path / "note", grace_seconds))
    process.start()
    assert process.pid is not None
    while not (tmp_path / "note").exists():
        time.sleep(0.02)
    began = time.monotonic()
    for moment in at:
        process.join(max(began + moment - time.monotonic(), 0))
        if process.is_alive():  # the last is for a process so slow that it noted the first late
            os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    assert time.monotonic() - began >= min(grace_seconds, 2.0)
