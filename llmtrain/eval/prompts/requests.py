"""Requests that a task makes of a model, and the model's responses. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.generate.options import Sampling


@dataclass(frozen=True)
class LoglikelihoodRequest:
    """Request for log p(continuation | context) (lm-evaluation-harness: `loglikelihood`).

    context, continuation: token ids, at least one each. document: index of the document in its task. option: number of
    the alternative within the document (a choice, a context option, a PMI premise or a window of a long text).
    """

    document: int
    option: int
    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Loglikelihood:
    """Response to a LoglikelihoodRequest.

    log_likelihood: sum over the continuation's tokens, in nats. greedy: every one of them is the argmax. tokens: how
    many were scored. truncated: tokens dropped from the left of the context to fit the model's window.
    """

    log_likelihood: float
    greedy: bool
    tokens: int
    truncated: int = 0


@dataclass(frozen=True)
class GenerateUntilRequest:
    """Request for a continuation until one of `stops` or max_new_tokens (lm-evaluation-harness: `generate_until`).

    stops: texts that end the answer and are no part of it. sampling: None is greedy; draws depend on its seed, on the document
    and on `repeat`, the answer's number where a document has several.
    """

    document: int
    context: tuple[int, ...]
    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling | None = None
    repeat: int = 0

    @property
    def row_number(self) -> int:
        """Number that seeds the draws, as in `llmtrain.generate.decoding.decode`."""
        return self.document + self.repeat * 2**20


@dataclass(frozen=True)
class GeneratedText:
    """Response to a GenerateUntilRequest. truncated: tokens dropped from the left of the context."""

    text: str
    truncated: int = 0


Request = LoglikelihoodRequest | GenerateUntilRequest
Response = Loglikelihood | GeneratedText
Responses = dict[int, list[Response]]
"""Responses by document index, in the order of the document's requests."""


def group_by_document(requests: Sequence[Request]) -> dict[int, list[int]]:
    """Indices of each document's requests, in order."""
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.document, []).append(index)
    return groups


def responses_in_order(requests: Sequence[Request], responses: Responses) -> list[Response]:
    """One response per request, from responses by document."""
    ordered: list[Any] = [None] * len(requests)
    for document, group in group_by_document(requests).items():
        for index, response in zip(group, responses[document], strict=True):
            ordered[index] = response
    return ordered
