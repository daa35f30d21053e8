"""An engine in another process, as the web application's process sees it. Imports no torch.

So the engine's thread does not wait for Python's lock while answers are written: on a GPU it takes and gives that lock hundreds of
times a step.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from llmtrain.errors import RunError
from llmtrain.generate.request import Request, Token
from llmtrain.logs import log
from llmtrain.serve.answering import EngineState, Sizes


class RemoteEngine(threading.Thread):
    """Answering by the engine at the other end of a connection (engine_process.py). lost: called where that process has ended."""

    def __init__(
        self,
        connection: Connection,
        sizes: Sizes,
        state: EngineState,
        lost: Callable[[], None],
        failed: Callable[[Request], None],
        stepped: Callable[[], None],
    ):
        super().__init__(name="engine", daemon=True)
        self.connection, self.sizes, self.state = connection, sizes, state
        self.lost, self.failed, self.stepped = lost, failed, stepped
        self.failure: str | None = None
        self._requests: dict[int, Request] = {}
        self._numbers: dict[Request, int] = {}
        self._count = itertools.count()
        self._stopping = self._closed = False
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        with self._lock:
            if self._closed:
                raise RunError("the engine has ended")
            number = next(self._count)
            self._requests[number], self._numbers[request] = request, number
            options = (request.max_new_tokens, request.sampling, request.ends, request.top, request.number)
            self._send((number, request.prompt, *options))

    def cancel(self, request: Request) -> None:
        with self._lock:
            number = self._numbers.pop(request, None)
            if number is not None:
                del self._requests[number]
                self._send(number)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._send(None)
        self.join()

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # `run` notices too, and ends the requests
            self.connection.send(message)

    def run(self) -> None:
        while True:
            try:
                drawn, self.state, self.failure = self.connection.recv()
            except (EOFError, OSError):
                break
            for number, *token in drawn:
                self._take(number, Token(*token))
            self.stepped()
            if self.failure:
                break
        with self._lock:
            self._closed = True
            left, self._requests = list(self._requests.values()), {}
            self._numbers.clear()
        for request in left:
            self.failed(request)
        self.stepped()
        if not (self._stopping or self.failure):
            self.failure = "its process has ended"
            log.error("the engine's process has ended, and with it this server")
            self.lost()

    def _take(self, number: int, token: Token) -> None:
        request = self._requests.get(number)  # a cancelled one may still get some
        if request is None:
            return
        request.tokens.append(token)
        try:
            stop = request.take(token)
        except Exception:
            log.exception("a token could not be taken")
            stop = True
            self.failed(request)
        if stop:
            self.cancel(request)
        elif token.end:
            with self._lock:
                self._requests.pop(number, None)
                self._numbers.pop(request, None)
