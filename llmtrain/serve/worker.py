"""The thread in which an engine answers a server's requests."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from llmtrain.errors import RunError
from llmtrain.generate.engine import Engine, Request
from llmtrain.logs import log

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms in seconds."""


class Histogram:
    """Numbers of values by size, as Prometheus counts them."""

    def __init__(self) -> None:
        self.counts, self.total, self.count = [0] * len(BUCKETS), 0.0, 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1
        for at, bound in enumerate(BUCKETS):
            self.counts[at] += value <= bound


@dataclass
class Counts:
    """Numbers for /metrics. ended: requests by the reason of their end."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0))
    refused: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)


class Worker(threading.Thread):
    """Runs the engine's steps until `stop`. A step that fails ends all requests, and the engine: `failure` is why.

    failed: called in this thread for each request that ends so. stepped: called there after each step, and at the end.
    """

    def __init__(self, engine: Engine, failed: Callable[[Request], None], stepped: Callable[[], None]):
        super().__init__(name="engine", daemon=True)
        self.engine, self.failed, self.stepped = engine, failed, stepped
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._stopping = self._closed = False
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        """Add a request that `Engine.check` has passed. From any thread. Raises RunError where the engine has ended."""
        with self._lock:
            if self._closed:
                raise RunError("the engine has ended")
            self._inbox.put(request)

    @property
    def waiting(self) -> int:
        """Requests that are not being answered yet."""
        return self._inbox.qsize() + len(self.engine.waiting)

    def stop(self) -> None:
        """End the thread; what is being answered is cancelled."""
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
                self.failure = error
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
