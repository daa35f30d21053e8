"""Requests with shared prefixes of several kinds, and their log-likelihoods by one plain forward pass each."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from llmtrain.eval.prompts.requests import Loglikelihood, LoglikelihoodRequest
from tests.support.models import VOCAB


def score_one_by_one(
    forward: Callable[[Tensor], Tensor], requests: Sequence[LoglikelihoodRequest], window: int = 10**9
) -> list[Loglikelihood]:
    """Log-likelihoods by one full forward pass and softmax per request. forward: ids [1, T] -> logits [1, T, vocab]."""
    found = []
    for request in requests:
        tokens = [*request.context, *request.continuation][-window - 1 :]
        with torch.no_grad():
            logits = forward(torch.tensor([tokens[:-1]]))[0]
        scores = logits.double().log_softmax(dim=-1)
        total, greedy, n = 0.0, True, len(request.continuation)
        for place in range(len(tokens) - 1 - n, len(tokens) - 1):
            total += float(scores[place, tokens[place + 1]])
            greedy = greedy and int(logits[place].argmax()) == tokens[place + 1]
        lost = len(request.context) + n - len(tokens)
        found.append(Loglikelihood(total, greedy, n, lost))
    return found


def assert_same_scores(
    found: Sequence[Loglikelihood], expected: Sequence[Loglikelihood], tolerance: float = 1e-5
) -> None:
    """Compare responses. tolerance: of a log-likelihood, relative or (below 1) absolute."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.log_likelihood == pytest.approx(theirs.log_likelihood, rel=tolerance, abs=tolerance)
        assert (mine.greedy, mine.tokens, mine.truncated) == (theirs.greedy, theirs.tokens, theirs.truncated)


class Text:
    """Random token ids."""

    def __init__(self, seed: int, vocab: int = VOCAB):
        self.rng, self.vocab = random.Random(seed), vocab

    def __call__(self, least: int, most: int | None = None) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocab) for _ in range(self.rng.randint(least, most or least)))


def choices(
    documents: int, *, shots: int = 0, seed: int = 0, first: int = 0, vocab: int = VOCAB
) -> list[LoglikelihoodRequest]:
    """A question with four choices of 1 to 9 tokens, and (as PMI asks) the choices after a premise of two; every question
    after the same `shots` tokens."""
    text = Text(seed, vocab)
    examples, premise = text(shots) if shots else (), text(2)
    made = []
    for document in range(first, first + documents):
        context = (*examples, *text(3, 30))
        options = [text(1, 9) for _ in range(4)]
        made += [LoglikelihoodRequest(document, i, context, option) for i, option in enumerate(options)]
        made += [LoglikelihoodRequest(document, 4 + i, premise, option) for i, option in enumerate(options)]
    return made


def letters(documents: int, *, shots: int = 0, seed: int = 1, vocab: int = VOCAB) -> list[LoglikelihoodRequest]:
    """A question and four choices of one token."""
    text = Text(seed, vocab)
    examples = text(shots) if shots else ()
    contexts = [(*examples, *text(3, 40)) for _ in range(documents)]
    return [
        LoglikelihoodRequest(i, option, context, (option,)) for i, context in enumerate(contexts) for option in range(4)
    ]


def schemas(documents: int, *, seed: int = 2, vocab: int = VOCAB) -> list[LoglikelihoodRequest]:
    """The same continuation after two contexts that share a prefix."""
    text = Text(seed, vocab)
    made = []
    for document in range(documents):
        start, continuation = text(6, 20), text(1, 12)
        made += [LoglikelihoodRequest(document, i, (*start, *text(1, 4)), continuation) for i in range(2)]
    return made


def texts(documents: int, *, seed: int = 3, vocab: int = VOCAB) -> list[LoglikelihoodRequest]:
    """One continuation each, some of them the longest part."""
    text = Text(seed, vocab)
    return [LoglikelihoodRequest(i, 0, text(1, 30), text(1, 40)) for i in range(documents)]


KINDS: dict[str, Callable[[], list[LoglikelihoodRequest]]] = {
    "choices": lambda: choices(9),
    "few-shot choices": lambda: choices(9, shots=60),
    "letters": lambda: letters(9),
    "few-shot letters": lambda: letters(9, shots=50),
    "schemas": lambda: schemas(12),
    "texts": lambda: texts(12),
    "all": lambda: [*choices(4, shots=40), *letters(4), *schemas(4), *texts(4)],
}
