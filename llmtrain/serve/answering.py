"""The engine as the web application sees it, in this process or another. Imports no torch."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from llmtrain.generate.request import Request


class Sizes(NamedTuple):
    """rows: requests answered at a time. max_len: tokens of a prompt and its answer together, at most."""

    rows: int
    max_len: int
    vocab_size: int


class EngineState(NamedTuple):
    """Numbers of an engine for /metrics. prefix_tokens: prompt tokens that were read before."""

    running: int
    waiting: int
    cache_bytes: int
    prompt_tokens: int = 0
    tokens: int = 0
    prefix_tokens: int = 0


class Answering(Protocol):
    """Answers requests until `stop`, in a thread of its own, which calls each request's `take`."""

    failure: str | None
    """Name of the error that ended the engine."""

    @property
    def sizes(self) -> Sizes: ...

    @property
    def state(self) -> EngineState: ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the thread; what is being answered is cancelled."""
        ...

    def submit(self, request: Request) -> None:
        """Add a request that `check` has passed. From any thread. Raises RunError where the engine has ended."""
        ...

    def cancel(self, request: Request) -> None:
        """Answer it no further. From any thread."""
        ...


MakeAnswering = Callable[[Callable[[Request], None], Callable[[], None]], Answering]
"""Of `failed`, called in its thread for each request that ends with the engine, and `stepped`, there after each step and at the
end."""
