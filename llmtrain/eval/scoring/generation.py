"""Generated answers: greedy decoding until a stop text, an end token or a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest
from llmtrain.eval.scoring.batching import Limits, batch_sorted
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.generate.text import TextStream
from llmtrain.models.causal_lm import CausalLM

_CONTEXT = 6
"""Last tokens of the prompt, decoded together with the first new ones, as in generate/text.py."""


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
    """Text of one answer, decoded token by token up to the first stop text or end token."""

    def __init__(
        self, tokenizer: TextTokenizer, context: Sequence[int], stops: Sequence[str], end_ids: Collection[int] = ()
    ):
        """end_ids: tokens that end the answer, beside the end-of-document token."""
        self.stream = TextStream(tokenizer, list(context[-_CONTEXT:]), stops)
        self.end_ids = {tokenizer.eod_id, *end_ids}
        self.text = ""
        self.ended = False

    def add(self, token: int) -> bool:
        """Add a token; return True when the answer has ended. Later tokens are ignored."""
        if self.ended:
            return True
        if token in self.end_ids:
            self.ended = True
        else:
            self.text += self.stream.add(token)
            self.ended = self.stream.stopped
        return self.ended

    def finish(self) -> str:
        self.text += self.stream.finish()
        return self.text


def decoding_batches(
    requests: Sequence[GenerateUntilRequest], contexts: Sequence[Sequence[int]], limits: Limits, call_cost: int
) -> Iterator[list[int]]:
    """Indices of requests that are decoded together: contexts of similar length, the same max_new_tokens."""

    def answer_length(index: int) -> int:
        return requests[index].max_new_tokens

    order = sorted(range(len(requests)), key=lambda i: (answer_length(i), -len(contexts[i])))
    for new_tokens, same in groupby(order, key=answer_length):
        yield from batch_sorted(
            list(same),
            rows=lambda first, new=new_tokens: limits.rows(len(contexts[first]), len(contexts[first]) + new),
            waste=lambda first, index: len(contexts[first]) - len(contexts[index]),
            call_cost=call_cost,
        )


def generate_greedily(
    model: CausalLM,
    tokenizer: TextTokenizer,
    requests: Sequence[GenerateUntilRequest],
    window: int,
    limits: Limits,
    progress: Callable[[int], None],
    end_ids: Collection[int] = (),
) -> list[GeneratedText]:
    """Responses in the order of the requests. Batches are as large as fits, because a decoding step costs about as much for many
    rows as for one."""
    contexts = [cut_context(request, window) for request in requests]
    found: dict[int, GeneratedText] = {}
    for batch in decoding_batches(requests, contexts, limits, call_cost=limits.tokens):
        answers = [Answer(tokenizer, contexts[index], requests[index].stops, end_ids) for index in batch]
        for _ in decode(
            model,
            [contexts[index] for index in batch],
            Sampling(temperature=0),
            max_new_tokens=requests[batch[0]].max_new_tokens,
            stop=lambda row, token, answers=answers: answers[row].add(token),
        ):
            pass
        for index, answer in zip(batch, answers, strict=True):
            lost = len(requests[index].context) - len(contexts[index])
            found[index] = GeneratedText(answer.finish(), truncated=lost)
        progress(len(batch))
    return [found[index] for index in range(len(requests))]
