"""Requests of an engine, and the tokens that it answers with. Imports no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmtrain.errors import UserError
from llmtrain.generate.options import Sampling

End = Literal["stop", "eod", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """A token of an answer. log_likelihood: under the model's own distribution, before temperature and penalties. top: the
    likeliest tokens with theirs, as many as the request asked for. end: "eod" of a token that ends texts, "length" of the last
    one that the request may have."""

    id: int
    log_likelihood: float
    top: tuple[tuple[int, float], ...] = ()
    end: Literal["eod", "length"] | None = None


@dataclass(eq=False)
class Request:
    """A prompt to be answered.

    ends: ids of the tokens that end the answer. top: number of likeliest tokens to report with each. take: called with each token
    as it is drawn; True ends the answer there ("stop"). number: of the row in a larger request, which with the seed fixes its
    draws. `cancelled` may be set from any thread. The answer is complete when `end` is set.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)
    ends: frozenset[int] = frozenset()
    top: int = 0
    take: Callable[[Token], bool] = lambda token: False
    number: int = 0
    tokens: list[Token] = field(default_factory=list)
    end: End | None = None
    cancelled: bool = False
    error: Exception | None = None
    """What `take` raised, which ended the answer as a cancellation does."""

    @property
    def tokens_at_most(self) -> int:
        """Number of tokens of the prompt and the answer."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def check(request: Request, vocab_size: int, max_len: int) -> None:
    """Raises UserError for a request that an engine of this size cannot answer."""
    if not request.prompt:
        raise UserError("a prompt has no tokens; give it at least the end-of-document token")
    if request.max_new_tokens < 1:
        raise UserError(f"{request.max_new_tokens} new tokens asked for; at least 1 is needed")
    wrong = next((one for one in request.prompt if not 0 <= one < vocab_size), None)
    if wrong is not None:
        raise UserError(f"token {wrong} is outside the model's vocabulary of {vocab_size}")
    total = request.tokens_at_most
    if total > max_len:
        raise UserError(
            f"a prompt of {len(request.prompt)} tokens and {request.max_new_tokens} new ones are {total}; there is room for "
            f"{max_len} together. Shorten the prompt or ask for fewer new tokens"
        )
