"""Generated answers: decoding until a stop text, an end token or a number of tokens."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import GenerateUntilRequest
from llmtrain.eval.scoring.batching import batch_sorted
from llmtrain.generate.text_stream import CONTEXT_TOKENS, TextStream

Requests = Sequence[GenerateUntilRequest]
Contexts = Sequence[Sequence[int]]
"""Token ids of each request's context, cut to the window."""


def cut_context(request: GenerateUntilRequest, window: int) -> tuple[int, ...]:
    """Last tokens of the context that leave room for max_new_tokens in the window. Raises EvalError for an empty context, and
    for an answer as long as the window."""
    if not request.context:
        raise EvalError(f"document {request.document}: an empty context cannot be continued; give it a token")
    if request.max_new_tokens >= window:
        raise EvalError(
            f"document {request.document}: {request.max_new_tokens} new tokens leave no room for a context in the "
            f"model's window of {window}; lower max_new_tokens"
        )
    return request.context[-(window - request.max_new_tokens) :]


class Answer:
    """Text of one answer, decoded token by token up to the first stop text or end token. Special tokens, but those that a stop
    text spells, are no part of it, as in lm-evaluation-harness and LLM Foundry."""

    def __init__(
        self, tokenizer: TextTokenizer, context: Sequence[int], stops: Sequence[str], end_ids: Collection[int] = ()
    ):
        """end_ids: tokens that end the answer, beside the end-of-document token."""
        self.stream = TextStream(tokenizer, list(context[-CONTEXT_TOKENS:]), stops)
        self.end_ids = {tokenizer.eod_id, *end_ids}
        added = tokenizer.backend.get_added_tokens_decoder().items()
        self.silent_ids = {
            number for number, one in added if one.special and not any(one.content in stop for stop in stops)
        }
        self.text = ""
        self.ended = False

    def add(self, token: int) -> bool:
        """Add a token; return True when the answer has ended. Later tokens are ignored."""
        if self.ended:
            return True
        if token in self.end_ids:
            self.ended = True
        elif token not in self.silent_ids:
            self.text += self.stream.add(token)
            self.ended = self.stream.stopped
        return self.ended

    def finish(self) -> str:
        self.text += self.stream.finish()
        return self.text


def decoding_batches(
    requests: Requests, contexts: Contexts, rows: Callable[[int, int], int], call_cost: int
) -> Iterator[list[int]]:
    """Indices of requests that are decoded together: contexts of similar length, the same max_new_tokens and sampling.

    rows: (tokens of the longest context, new tokens) -> most rows. call_cost: most tokens of padding, 0 for contexts of one length.
    """

    def kind(index: int) -> tuple[int, str]:
        return requests[index].max_new_tokens, repr(requests[index].sampling)

    order = sorted(range(len(requests)), key=lambda i: (kind(i), -len(contexts[i])))
    for (new_tokens, _), same in groupby(order, key=kind):
        yield from batch_sorted(
            list(same),
            rows=lambda first, new=new_tokens: rows(len(contexts[first]), new),
            waste=lambda first, index: len(contexts[first]) - len(contexts[index]),
            call_cost=call_cost,
        )
