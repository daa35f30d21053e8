"""The thread in which an engine answers requests."""

import queue
import threading
from collections.abc import Callable

from llmtrain.errors import RunError
from llmtrain.generate.engine import Engine
from llmtrain.generate.request import Request
from llmtrain.logs import log
from llmtrain.serve.answering import EngineState, Sizes


class Worker(threading.Thread):
    """Runs the engine's steps until `stop` (Answering). A step that fails ends all requests, and the engine."""

    def __init__(self, engine: Engine, failed: Callable[[Request], None], stepped: Callable[[], None]):
        super().__init__(name="engine", daemon=True)
        self.engine, self.failed, self.stepped = engine, failed, stepped
        self.failure: str | None = None
        self._fixed_bytes = engine.nbytes - (engine.prefixes.nbytes if engine.prefixes else 0)
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._stopping = self._closed = False
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        with self._lock:
            if self._closed:
                raise RunError("the engine has ended")
            self._inbox.put(request)

    def cancel(self, request: Request) -> None:
        request.cancelled = True

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.engine.rows, self.engine.max_len, self.engine.model.config.vocab_size)

    @property
    def state(self) -> EngineState:
        engine, prefixes = self.engine, self.engine.prefixes
        kept, reused = (prefixes.nbytes, prefixes.reused_tokens) if prefixes else (0, 0)
        waiting, nbytes = self._inbox.qsize() + len(engine.waiting), self._fixed_bytes + kept
        return EngineState(
            len(engine.active()), waiting, nbytes, engine.prompt_tokens_read, engine.tokens_drawn, reused
        )

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        self.join()

    def run(self) -> None:
        while not self._stopping:
            self._receive()
            if not self.engine.busy:
                continue
            try:
                self.engine.step()
                self.stepped()
            except Exception as error:
                self.failure = type(error).__name__
                log.exception("the engine failed; this server answers no further requests")
                break
        self._end()

    def _receive(self) -> None:
        """Take what was submitted; wait for it if there is nothing else to do."""
        while not self._inbox.empty() or not (self.engine.busy or self._stopping):
            request = self._inbox.get()
            if request is None:
                return
            self.engine.waiting.append(request)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
        left = [*self.engine.waiting, *(active.request for active in self.engine.active())]
        while not self._inbox.empty():
            request = self._inbox.get()
            left += [] if request is None else [request]
        for request in left:
            request.end = "cancelled"
            self.failed(request)
        self.stepped()
