"""Error of tasks, documents and models under evaluation."""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmtrain.config import limits
from llmtrain.errors import UserError, first_few


class EvalError(UserError):
    """A task, document, model or tokenizer that cannot be used; the message has its location, the finding and a remedy."""


class LimitExceeded(EvalError):
    """A document that took longer, or became longer, than any should. It ends its task: with a thousand others of its kind, an
    evaluation would take hours to say so."""


DOCUMENT_SECONDS, DOCUMENT_CHARACTERS = limits.DOCUMENT_SECONDS, limits.DOCUMENT_CHARACTERS
time_limit = functools.partial(limits.time_limit, error=LimitExceeded)


@contextmanager
def prefixed(lead: str, *others: type[Exception]) -> Iterator[None]:
    """Context in which an EvalError, or an exception of the classes `others`, becomes an EvalError that begins with `lead`.
    LimitExceeded stays one."""
    try:
        yield
    except (EvalError, *others) as error:
        kind = LimitExceeded if isinstance(error, LimitExceeded) else EvalError
        raise kind(f"{lead}: {str(error) or type(error).__name__}") from None


class TaskFailed(EvalError):
    """A task that cannot be evaluated, while others can; raised on every rank alike."""


class BadDocuments(EvalError):
    """Documents of a task that cannot be used.

    reasons: why, by location (file and line). rest: what was made of the other documents, for callers that leave these out.
    """

    def __init__(self, task: str, reasons: Mapping[str, str], rest: Any):
        self.task, self.reasons, self.rest = task, dict(reasons), rest
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"{where}: {reason}" for where, reason in self.reasons.items()]
        advice = "skip_bad_documents: true leaves out what cannot be used"
        if len(lines) == 1:
            return f"task {self.task}: {lines[0]} ({advice})"
        head = f"task {self.task}: {len(lines):,} documents cannot be used ({advice}):"
        return f"{head}\n  " + first_few(lines, 5, "\n  ")
