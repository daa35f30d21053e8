"""Texts to requests: encodes many prompts at a time, because tokenizers run batches on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.scoring.request import Generate, Score
from llmtrain.eval.tasks.documents import Document

_BATCH, _CHARACTERS = 512, 200_000
"""Prompts encoded at a time, and about how much text: enough for all cores, and not for long."""

Ids = dict[str, list[int]]


@dataclass(frozen=True)
class Prompt:
    """What is to be tokenised for one request. continuation: None where text is to be generated.

    before: text tokenised on its own in front of the context (foundry: everything before the document).
    """

    document: Document
    option: int
    context: str
    continuation: str | None
    before: str = ""
    premise: bool = False
    """A PMI premise, which may be empty: then nothing but the beginning of a document precedes the continuation."""


@dataclass(frozen=True)
class Generation:
    """How far a generated answer may go."""

    stops: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Encoding:
    """How a convention tokenises a prompt.

    texts: the (plain, special) texts whose ids `join` will ask for; join: (context, continuation) ids.
    """

    texts: Callable[[Prompt], tuple[Sequence[str], Sequence[str]]]
    join: Callable[[Prompt, Ids, Ids, PromptTokenizer], tuple[list[int], list[int]]]


def encode(
    prompts: Iterable[Prompt], encoding: Encoding, tokenizer: PromptTokenizer, generation: Generation | None
) -> Iterator[list[Score | Generate]]:
    """Some at a time. Raises EvalError, with file and line, for a prompt that leaves nothing to score or nothing to start from."""
    left = iter(prompts)
    while batch := _some(left):
        plain: dict[str, None] = {}
        special: dict[str, None] = {}
        for prompt in batch:
            for known, texts in zip((plain, special), encoding.texts(prompt), strict=True):
                known.update(dict.fromkeys(texts))
        plain_ids = dict(zip(plain, tokenizer.plain_batch(list(plain)), strict=True))
        special_ids = dict(zip(special, tokenizer.special_batch(list(special)), strict=True))
        yield [
            _request(prompt, *encoding.join(prompt, plain_ids, special_ids, tokenizer), generation) for prompt in batch
        ]


def _some(prompts: Iterator[Prompt]) -> list[Prompt]:
    batch: list[Prompt] = []
    characters = 0
    for prompt in islice(prompts, _BATCH):
        batch.append(prompt)
        characters += len(prompt.before) + len(prompt.context) + len(prompt.continuation or "")
        if characters > _CHARACTERS:
            break
    return batch


def _request(
    prompt: Prompt, context: list[int], continuation: list[int], generation: Generation | None
) -> Score | Generate:
    document = prompt.document
    if not context:
        raise EvalError(
            f"{document.where}: the prompt is empty, and this tokenizer puts no BOS before it, so that the first token "
            "could not be predicted from anything; give the task a preamble or a prelimiter"
        )
    if prompt.continuation is None:
        assert generation is not None
        return Generate(document.index, tuple(context), generation.stops, generation.max_new_tokens)
    if not continuation:
        raise EvalError(f"{document.where}: {prompt.continuation!r} has no token of its own after its context")
    return Score(document.index, prompt.option, tuple(context), tuple(continuation))
