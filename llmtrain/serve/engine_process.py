"""The engine's side of a server of two processes: this one computes, and the one it starts (front.py) speaks HTTP."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from llmtrain.errors import RunError, signal_name
from llmtrain.generate.engine import Engine
from llmtrain.generate.request import Request, Token
from llmtrain.serve.worker import Worker


@contextlib.contextmanager
def front(listening: socket.socket) -> Iterator[tuple[subprocess.Popen[bytes], Connection]]:
    """The process of the web application, which inherits a listening socket, and a connection to it. It begins at once, and ends
    with the block."""
    ours, theirs = socket.socketpair()
    with theirs, listening:
        numbers = [theirs.fileno(), listening.fileno()]
        # A session of its own: Ctrl-C reaches this process alone, which hands it on.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmtrain.serve.front", *map(str, numbers)],
            pass_fds=numbers,
            start_new_session=True,
        )
    connection = Connection(ours.detach())
    try:
        yield process, connection
    finally:
        connection.close()
        if process.poll() is None:
            process.kill()
        process.wait()


def answer(engine: Engine, process: subprocess.Popen[bytes], connection: Connection, setup: Any) -> int:
    """Answer the front's requests until it ends. setup: what `front.main` takes. Returns its exit status. Raises RunError
    where a signal has ended it."""
    pipe = EnginePipe(engine, connection)
    before = {
        number: signal.signal(number, lambda number, frame: process.send_signal(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        connection.send((pipe.worker.sizes, pipe.worker.state, setup))
        pipe.run()
        status = process.wait()
        if status < 0:
            raise RunError(f"the process that speaks HTTP was ended by {signal_name(-status)}")
        return status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EnginePipe:
    """An engine that answers what comes through a connection: requests as RemoteEngine sends them, numbers of those to cancel, None
    at the end. After each step it sends (drawn tokens, EngineState, the engine's failure)."""

    def __init__(self, engine: Engine, connection: Connection):
        self.connection, self.requests = connection, dict[int, Request]()
        self.drawn: list[tuple[Any, ...]] = []
        self.worker = Worker(engine, lambda request: None, self._send)

    def run(self) -> None:
        self.worker.start()
        try:
            while (message := self.connection.recv()) is not None:
                if isinstance(message, int):
                    if request := self.requests.pop(message, None):
                        request.cancelled = True
                else:
                    self._submit(*message)
        except (EOFError, OSError):
            pass
        self.worker.stop()
        self.connection.close()

    def _submit(self, number: int, prompt: list[int], *options: Any) -> None:
        new, sampling, ends, top, of_body = options

        def take(token: Token) -> bool:
            self.drawn.append((number, token.id, token.log_likelihood, token.top, token.end))
            if token.end:
                self.requests.pop(number, None)
            return False

        request = Request(prompt, new, sampling, ends, top, take, of_body)
        self.requests[number] = request
        # Where the engine has failed, the front knows, or will.
        with contextlib.suppress(RuntimeError):
            self.worker.submit(request)

    def _send(self) -> None:
        """Send what the step has made. Called in the engine's thread."""
        drawn, self.drawn = self.drawn, []
        with contextlib.suppress(OSError):  # `run` notices that the front has gone
            self.connection.send((drawn, self.worker.state, self.worker.failure))
