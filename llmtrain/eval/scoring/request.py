"""What a task asks of a model, and what it gets back. No torch here: tasks know nothing of models, nor models of tasks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """How likely is this continuation after this context?

    context, continuation: token ids; the continuation has at least one, the context may be empty only if the scorer is
    to start from nothing. document: index of the document in its task. option: which of its alternatives this is (a
    choice, a context option, or a PMI premise, numbered by the task).
    """

    document: int
    option: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """log_likelihood: sum over the continuation's tokens, in nats. greedy: every one of them is the argmax.

    tokens: how many were scored. truncated: tokens dropped from the left of the context to fit the model's window.
    """

    log_likelihood: float
    greedy: bool
    tokens: int
    truncated: int = 0


@dataclass(frozen=True)
class Generate:
    """Continue this text greedily until one of `stops` (not part of the answer) or max_new_tokens."""

    document: int
    context: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Generated:
    text: str
    truncated: int = 0
