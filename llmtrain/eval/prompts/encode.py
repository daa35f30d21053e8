"""Tokenised requests from prompts, many at a time, because tokenizers run batches on all cores."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest, Request
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import AnyDocument
from llmtrain.generate.options import Sampling


def rolling_requests(
    documents: Sequence[AnyDocument], tokenizer: PromptTokenizer, max_seq_len: int, bad: dict[int, str] | None = None
) -> Iterator[LoglikelihoodRequest]:
    """One request per window, numbered within its document; the model reads at most max_seq_len tokens for each.

    As in lm-evaluation-harness, the first token follows BOS (EOS for tokenizers without BOS), windows are disjoint, and the
    context of the last one is so long that its window is full. bad: takes the reasons of texts without tokens, by index. Raises
    EvalError for the first of them where there is no `bad`.
    """
    for document in documents:
        text = document.text
        ids = tokenizer.plain(text) if text.startswith(tokenizer.prefix_token) else tokenizer.special(text)
        if not ids and bad is None:
            raise EvalError(f"{document.where}: the text has no tokens")
        if not ids and bad is not None:
            bad[document.index] = "the text has no tokens"
            continue
        for window, (context, continuation) in enumerate(_windows(ids, tokenizer.prefix_id, max_seq_len)):
            yield LoglikelihoodRequest(document.index, window, tuple(context), tuple(continuation))


def _windows(ids: list[int], prefix: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    yield [prefix], ids[:size]
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        # The model reads all but the last scored token: size tokens from end - size - 1 on.
        yield ids[end - size - 1 : begin], ids[begin:end]


_BATCH, _CHARACTERS = 512, 200_000
"""Most prompts and characters encoded at a time: enough work for all cores, for some milliseconds."""

_END = 24
"""Characters of a context, without white space at its end, on which the tokens of the continuation may depend."""

Ids = dict[str, list[int]]


@dataclass(frozen=True)
class Prompt:
    """Texts of one request. continuation: None where text is to be generated.

    before: text in front of the context that is tokenised separately (foundry: preamble and examples).
    """

    document: AnyDocument
    option: int
    context: str
    continuation: str | None
    before: str = ""
    premise: bool = False
    """The context is a PMI premise, which may be empty: then only BOS or EOS precedes the continuation."""


@dataclass(frozen=True)
class GenerationLimits:
    """Ends of a generated answer: stop texts and a number of tokens. sampling: None is greedy."""

    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Encoding:
    """Tokenisation of a prompt by a convention.

    texts: the texts to encode without and with special tokens. join: (context, continuation) ids of the request, from the ids of
    these texts.
    """

    texts: Callable[[Prompt, PromptTokenizer], tuple[Sequence[str], Sequence[str]]]
    join: Callable[[Prompt, Ids, Ids, PromptTokenizer], tuple[list[int], list[int]]]


def encode(
    prompts: Iterable[Prompt],
    encoding: Encoding,
    tokenizer: PromptTokenizer,
    limits: GenerationLimits | None,
    bad: dict[int, str] | None = None,
) -> Iterator[list[Request]]:
    """Requests of the prompts, in lists of some hundred.

    limits: those of generated answers. bad: takes the reasons of documents with a context or continuation without tokens, by their
    index. Raises EvalError, with file and line, for the first of them where there is no `bad`.
    """
    left = iter(prompts)
    while batch := _some(left):
        plain: dict[str, None] = {}
        special: dict[str, None] = {}
        for prompt in batch:
            for known, texts in zip((plain, special), encoding.texts(prompt, tokenizer), strict=True):
                known.update(dict.fromkeys(texts))
        plain_ids = dict(zip(plain, tokenizer.plain_batch(list(plain)), strict=True))
        special_ids = dict(zip(special, tokenizer.special_batch(list(special)), strict=True))
        made: list[Request] = []
        for prompt in batch:
            try:
                made.append(_request(prompt, *encoding.join(prompt, plain_ids, special_ids, tokenizer), limits))
            except EvalError as error:
                if bad is None:
                    raise EvalError(f"{prompt.document.where}: {error}") from None
                bad.setdefault(prompt.document.index, str(error))
        yield made


def shortened(prompt: Prompt) -> Prompt:
    """Prompt with the end of its context, with which its continuation has the same tokens, but for rare tokenizers."""
    context, before = _end(prompt.context), _end(prompt.before)
    return Prompt(prompt.document, prompt.option, context, prompt.continuation, before, prompt.premise)


def _end(text: str) -> str:
    return text[max(len(text.rstrip()) - _END, 0) :] if len(text) > _END else text


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
            "the prompt is empty, and this tokenizer puts no BOS before it, so that the first token could not be predicted "
            "from anything; give the task a preamble or a prelimiter"
        )
    if prompt.continuation is None:
        assert limits is not None
        return GenerateUntilRequest(
            document.index, tuple(context), limits.stops, limits.max_new_tokens, limits.sampling
        )
    if not continuation:
        raise EvalError(f"{prompt.continuation!r} has no token of its own after its context")
    return LoglikelihoodRequest(document.index, prompt.option, tuple(context), tuple(continuation))
