"""Processes that act as the ranks of a run, and stay for many tests: importing Composer takes many seconds."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

from llmtrain.distributed.processes import end_with_parent
from llmtrain.distributed.world import free_port, initialize, rank_environment


class RankFailed(Exception):
    """A job raised on some ranks; the text holds what each of them raised."""


_SHARED = "LLMTRAIN_TESTS_WARM"
"""Variable with the address of a process that has imported Composer, which the workers of pytest-xdist share."""


def share_warm() -> None:
    """Start the process that `warm` forks from, for this process and those that it will start: each would import for itself.
    What is printed there leads nowhere, as in a worker of pytest-xdist."""
    if torch.cuda.is_available():
        return
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        warm()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
    server: Any = forkserver._forkserver
    if not hasattr(server, "_forkserver_authkey"):
        os.environ[_SHARED] = server._forkserver_address


def warm() -> Any:
    """The context of processes that are forked from one that has imported Composer. With GPUs they are spawned: its imports look
    for some, and CUDA is of no use in a fork of a process that has."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    server: Any = forkserver._forkserver
    if (address := os.environ.get(_SHARED)) and server._forkserver_address != address:
        server._forkserver_address, server._forkserver_alive_fd = address, os.pipe()[0]
        server.ensure_running = resource_tracker.ensure_running
        return context
    context.set_forkserver_preload(["llmtrain.train.run"])
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # ranks that share cores must not spin on them
        server.ensure_running()
    return context


class Ranks:
    """A group of `size` processes of the context `warm`: gloo, or NCCL where there are GPUs.

    Between jobs they are stopped: gloo polls in every process group that a run has made, a tenth of a core or more.
    `worn`: has run enough jobs. Composer keeps what it trained with until the process ends, open files among it.
    """

    def __init__(self, size: int):
        context = warm()
        port = free_port()
        self.alive = True
        self.jobs = 0
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 400) -> list[Any]:
        """Run job(*args) on every rank; return the results. Raises RankFailed if it raised on any, or a rank hung, died or did not
        begin."""
        self.jobs += 1
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # its end is heard below
                pipe.send_bytes(pickle.dumps((job, args)))
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self.pipes):
            try:
                heard = pipe.poll(max(deadline - time.monotonic(), 0))
                answers.append(pickle.loads(pipe.recv_bytes()) if heard else (False, f"rank {rank} hung"))
            except (EOFError, ConnectionResetError):
                self.processes[rank].join(10)
                status = self.processes[rank].exitcode
                heard, _ = False, answers.append((False, f"rank {rank} died with status {status}; its words: stderr"))
            if not heard:
                self.kill()  # the next test gets a new group
                break
        self._signal(signal.SIGSTOP)
        failures = [str(answer) for fine, answer in answers if not fine]
        if failures:
            raise RankFailed("\n".join(failures))
        return [answer for _, answer in answers]

    @property
    def worn(self) -> bool:
        return self.jobs >= 20

    def _signal(self, sign: signal.Signals) -> None:
        if self.alive:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):  # `run` says that it died
                    os.kill(process.pid, sign)

    def kill(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        if not self.alive:
            return
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self.processes:
            process.join(10)
        self.kill()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    end_with_parent()  # also while it is stopped
    os.environ.update(rank_environment(rank, size, port))
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a rank of a real run
    torch.set_num_threads(1)
    beginning = None
    try:
        initialize()
    except BaseException:
        beginning = (False, f"rank {rank} did not begin: {traceback.format_exc()}")
    while (work := pickle.loads(pipe.recv_bytes())) is not None:
        job, args = work
        try:
            answer = beginning or (True, job(*args))
        except BaseException:
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send_bytes(pickle.dumps(answer))  # by value: pipe.send passes an open file for each tensor
    if beginning is None:
        torch.distributed.destroy_process_group()
