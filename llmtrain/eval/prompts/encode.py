"""Tokenised requests from prompts, many at a time, because tokenizers run batches on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import Document

_BATCH, _CHARACTERS = 512, 200_000
"""Most prompts and characters encoded at a time: enough work for all cores, for some milliseconds."""

Ids = dict[str, list[int]]


@dataclass(frozen=True)
class Prompt:
    """Texts of one request. continuation: None where text is to be generated.

    before: text in front of the context that is tokenised separately (foundry: preamble and examples).
    """

    document: Document
    option: int
    context: str
    continuation: str | None
    before: str = ""
    premise: bool = False
    """The context is a PMI premise, which may be empty: then only BOS or EOS precedes the continuation."""


@dataclass(frozen=True)
class GenerationLimits:
    """Ends of a generated answer: stop texts and a number of tokens."""

    stops: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Encoding:
    """Tokenisation of a prompt by a convention.

    texts: the texts to encode without and with special tokens. join: (context, continuation) ids of the request, from the ids of
    these texts.
    """

    texts: Callable[[Prompt], tuple[Sequence[str], Sequence[str]]]
    join: Callable[[Prompt, Ids, Ids, PromptTokenizer], tuple[list[int], list[int]]]


def encode(
    prompts: Iterable[Prompt], encoding: Encoding, tokenizer: PromptTokenizer, limits: GenerationLimits | None
) -> Iterator[list[Request]]:
    """Requests of the prompts, in lists of some hundred.

    limits: those of generated answers. Raises EvalError, with file and line, for a context or continuation without tokens.
    """
    left = iter(prompts)
    while batch := _some(left):
        plain: dict[str, None] = {}
        special: dict[str, None] = {}
        for prompt in batch:
            for known, texts in zip((plain, special), encoding.texts(prompt), strict=True):
                known.update(dict.fromkeys(texts))
        plain_ids = dict(zip(plain, tokenizer.plain_batch(list(plain)), strict=True))
        special_ids = dict(zip(special, tokenizer.special_batch(list(special)), strict=True))
        yield [_request(prompt, *encoding.join(prompt, plain_ids, special_ids, tokenizer), limits) for prompt in batch]


def _some(prompts: Iterator[Prompt]) -> list[Prompt]:
    batch: list[Prompt] = []
    characters = 0
    for prompt in islice(prompts, _BATCH):
        batch.append(prompt)
        characters += len(prompt.before) + len(prompt.context) + len(prompt.continuation or "")
        if characters > _CHARACTERS:
            break
    return batch


def _request(prompt: Prompt, context: list[int], continuation: list[int], limits: GenerationLimits | None) -> Request:
    document = prompt.document
    if not context:
        raise EvalError(
            f"{document.where}: the prompt is empty, and this tokenizer puts no BOS before it, so that the first token "
            "could not be predicted from anything; give the task a preamble or a prelimiter"
        )
    if prompt.continuation is None:
        assert limits is not None
        return GenerateUntilRequest(document.index, tuple(context), limits.stops, limits.max_new_tokens)
    if not continuation:
        raise EvalError(f"{document.where}: {prompt.continuation!r} has no token of its own after its context")
    return LoglikelihoodRequest(document.index, prompt.option, tuple(context), tuple(continuation))
