"""Messages among the ranks of an examination, through the store at which they meet, none of which waits without a time limit."""

import contextlib
import copy
import functools
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from llmtrain.distributed.world import LISTENER, World, host_name, launched_by_a_launcher
from llmtrain.errors import RunError, first_line, named_line

_ANSWER_SECONDS = 5.0
"""Time for messages of the other ranks after the deadline."""
_GRACE = 2.0
"""Seconds for a rank's own answer once another one has failed."""
_LOST = 12.0
"""Seconds after the deadline by which rank 0 has answered, or cannot be reached any more."""
_numbers = itertools.count()


@functools.cache
def _meet(world: World, patience: float):
    """The store of the job, a torch.distributed.Store: torchrun's, or one that rank 0 opens at MASTER_PORT. It stays open, since
    the run's own group finds it there. Raises RunError where rank 0 cannot be reached."""
    import torch.distributed as dist

    if not launched_by_a_launcher():
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=patience)
    if not opens:
        _await_listener(address, port, patience)
    handle = os.environ.pop(LISTENER, None) if opens else None
    try:
        return dist.TCPStore(
            address,
            port,
            world.size,
            opens,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=handle is None,  # the run's own store is then the same
            master_listen_fd=None if handle is None else int(handle),
        )
    except (RuntimeError, ValueError) as error:
        raise _unreached(address, port, patience, error) from None


def _await_listener(address: str, port: int, patience: float) -> None:
    """Wait until somebody listens there. PyTorch's store would try for twice its time limit and longer. Raises RunError."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((address, port), timeout=max(deadline - time.monotonic(), 0.1)).close()
        except OSError as error:  # also of an unknown name
            if time.monotonic() > deadline:
                raise _unreached(address, port, patience, error) from None
        time.sleep(min(0.2, patience))


def _unreached(address: str, port: int, patience: float, error: Exception) -> RunError:
    return RunError(
        f"preflight: rank {os.environ['RANK']} on {host_name()} does not reach rank 0 at {address}:{port} in "
        f"{patience:g} s ({first_line(error)[:200]}): that node is not there, or MASTER_ADDR is wrong"
    )


class Exchange:
    """Messages of one examination among the ranks, through their store, until a deadline that is the same part of it for all."""

    def __init__(self, world: World, patience: float):
        import torch.distributed as dist

        self.world, self.patience = world, patience
        prefix = f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_numbers)}"
        self._store = dist.PrefixStore(prefix, _meet(world, patience))
        self.renew()

    def renew(self) -> None:
        self._deadline = time.monotonic() + self.patience

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    def lost(self) -> RunError:
        return RunError(f"preflight: rank 0 at {os.environ.get('MASTER_ADDR')} stopped answering {host_name()}")

    def fail(self) -> None:
        """Let the ranks that wait for this one stop."""
        self._store.set("failed", "")

    def failed(self) -> bool:
        return self._store.check(["failed"])

    def branch(self) -> "Exchange":
        """The same exchange through a connection of its own, for a thread: one that waits keeps its connection."""
        branch = copy.copy(self)
        branch._store = self._store.clone()  # type: ignore[attr-defined]
        return branch

    def group_store(self):
        """A store for the process group of the all-reduces."""
        import torch.distributed as dist

        return dist.PrefixStore("group", self._store)

    def put(self, what: str, text: str, number: int | None = None) -> None:
        self._store.set(f"{what}/{self.world.rank if number is None else number}", text)

    def get(self, what: str, number: int, seconds: float | None = None) -> str:
        """A message, once it is there. Raises RuntimeError after so many seconds (default: at the deadline)."""
        seconds = max(self.left if seconds is None else seconds, 0.01)
        self._store.wait([f"{what}/{number}"], timedelta(seconds=seconds))
        return self._store.get(f"{what}/{number}").decode()

    def collect(self, what: str) -> tuple[dict[int, str], list[int]]:
        """(messages by rank, ranks without one, a moment after the deadline)."""
        found, missing = {}, []
        for rank in range(self.world.size):
            try:
                found[rank] = self.get(what, rank, self.left + min(_ANSWER_SECONDS, self.patience))
            except RuntimeError:
                missing.append(rank)
        return found, missing

    def publish(self, what: str, message: dict[str, Any], absent: Collection[int] = ()) -> None:
        """Answer all ranks, on rank 0, and wait until those that are there have read it: the store ends with this process."""
        self.put(what, json.dumps(message))
        deadline = time.monotonic() + min(_ANSWER_SECONDS, self.patience)
        for rank in set(range(1, self.world.size)).difference(absent):
            with contextlib.suppress(RuntimeError):
                self.get(f"read/{what}", rank, deadline - time.monotonic())

    def await_main(self, what: str) -> dict[str, Any]:
        """The message of rank 0. Raises RunError if there is none."""
        try:
            text = self.get(what, 0, self.left + 2 * _ANSWER_SECONDS)
            self.put(f"read/{what}", "")
        except RuntimeError:
            raise self.lost() from None
        return json.loads(text)

    def agree(self, fine: bool, what: str) -> bool:
        """True if it is fine on every rank."""
        self.put(what, "fine" if fine else "")
        if self.world.is_main:
            answers, missing = self.collect(what)
            self.publish(f"all {what}", {"fine": not missing and all(answers.values())}, missing)
        return self.await_main(f"all {what}")["fine"]

    def clock_offset(self) -> float:
        """Seconds by which this node's clock is ahead of rank 0's, which answers every node's first rank in turn."""
        nodes, here, offset = self.world.size // self.world.local_size, self.world.rank // self.world.local_size, 0.0
        if not self.world.is_main:
            with contextlib.suppress(RuntimeError):  # rank 0 ended: `await_main` reports it
                self.get("turn", here)
                asked = wall_clock()
                self.put("ask", "", here)
                main = float(self.get("clock", here))
                offset = (asked + wall_clock()) / 2 - main
            return offset
        for node in range(1, nodes):
            self.put("turn", "", node)
            with contextlib.suppress(RuntimeError):  # a node that is gone is missing in what is collected
                self.get("ask", node, min(self.left, 5.0))
                self.put("clock", repr(wall_clock()), node)
        return offset


def wall_clock() -> float:
    return time.time()


def within(exchange: "Exchange", work: Callable[["Exchange"], Any]) -> tuple[Any, str | None]:
    """(result, None), or (None, why there is none): `work` in a thread that is left behind when it hangs. (None, None) once another
    rank has failed, for which this one would wait."""
    thread = _Thread(functools.partial(work, exchange.branch()))
    while thread.is_alive() and exchange.left > 0:
        thread.join(0.25)
        if thread.is_alive() and exchange.failed():
            thread.join(_GRACE)
            if thread.is_alive():
                return None, None
    error = f"no answer in {exchange.patience:g} s" if thread.is_alive() else None
    if thread.error is not None:  # whatever a GPU or network does wrong is what is looked for
        error = named_line(thread.error, 300)
    if error is not None:
        exchange.fail()
    return thread.result, error


def guarded(exchange: "Exchange", work: Callable[[], Any]) -> Any:
    """The result of `work`, or what it raises. Raises RunError where it hangs: the store's own time limits do not hold on a node
    whose network is gone."""
    thread = _Thread(work)
    while thread.is_alive() and exchange.left > -_LOST:
        thread.join(0.25)
    if thread.is_alive():
        raise exchange.lost()
    if thread.error is not None:
        raise thread.error
    return thread.result


class _Thread(threading.Thread):
    """Runs `work` from now on. result, error: what it returned, or raised."""

    def __init__(self, work: Callable[[], Any]):
        super().__init__(daemon=True)
        self._work, self.result, self.error = work, None, None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error
