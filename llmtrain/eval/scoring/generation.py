"""Answers in text: greedy decoding until a stop text, the end-of-document token or a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby

from llmtrain.data.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.scoring.batching import Limits, pack
from llmtrain.eval.scoring.request import Generate, Generated
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.generate.text import TextStream
from llmtrain.models.hybrid import HybridLM

_CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new ones, as in generate/text.py."""


def cut_context(request: Generate, window: int) -> tuple[int, ...]:
    """The end of the context that leaves room for the answer. Raises EvalError when nothing does, or there is none."""
    if not request.context:
        raise EvalError(f"document {request.document}: an empty context cannot be continued; give it a token")
    if request.max_new_tokens >= window:
        raise EvalError(
            f"document {request.document}: {request.max_new_tokens} new tokens leave no room for a context in the "
            f"model's window of {window}; lower max_new_tokens"
        )
    return request.context[-(window - request.max_new_tokens) :]


class Answer:
    """Tokens to the text before the first stop."""

    def __init__(
        self, tokenizer: TextTokenizer, context: Sequence[int], stops: Sequence[str], end_ids: Collection[int] = ()
    ):
        """end_ids: tokens beside the end-of-document one that end it."""
        self.stream = TextStream(tokenizer, list(context[-_CONTEXT:]), stops)
        self.end_ids = {tokenizer.eod_id, *end_ids}
        self.text = ""
        self.ended = False

    def add(self, token: int) -> bool:
        """Whether the answer ends here. Nothing is taken after that."""
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


def batches(
    requests: Sequence[Generate], contexts: Sequence[Sequence[int]], limits: Limits, patience: int
) -> Iterator[list[int]]:
    """Indices of requests that are decoded together: alike in length of context, equal in length of answer."""

    def answer_length(index: int) -> int:
        return requests[index].max_new_tokens

    order = sorted(range(len(requests)), key=lambda i: (answer_length(i), -len(contexts[i])))
    for new_tokens, same in groupby(order, key=answer_length):
        yield from pack(
            list(same),
            rows=lambda first, new=new_tokens: limits.rows(len(contexts[first]), len(contexts[first]) + new),
            waste=lambda first, index: len(contexts[first]) - len(contexts[index]),
            patience=patience,
        )


def generate_greedily(
    model: HybridLM,
    tokenizer: TextTokenizer,
    requests: Sequence[Generate],
    window: int,
    limits: Limits,
    progress: Callable[[int], None],
    end_ids: Collection[int] = (),
) -> list[Generated]:
    """In the order of the requests. A batch ends with its longest answer: a token costs about as much for many rows as
    for one, so batches are as large as fits."""
    contexts = [cut_context(request, window) for request in requests]
    found: dict[int, Generated] = {}
    for batch in batches(requests, contexts, limits, patience=limits.tokens):
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
            found[index] = Generated(answer.finish(), truncated=lost)
        progress(len(batch))
    return [found[index] for index in range(len(requests))]
