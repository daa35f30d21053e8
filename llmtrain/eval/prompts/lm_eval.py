"""Prompts as the tasks of lm-evaluation-harness 0.4.13 write them and its `hf` model tokenises them.

Context and continuation are tokenised together, and the context alone; the tokens of the first beyond the length of the
second are the continuation's. White space at the end of the context is moved to the continuation. An empty context
becomes BOS, or EOS for tokenizers without BOS. A text that begins with BOS as written gets no second one.
"""

from collections.abc import Iterator, Sequence
from random import Random

from llmtrain.eval.errors import EvalError, LimitExceeded
from llmtrain.eval.prompts.chat import PLAIN, PromptStyle, Turn, question_turns
from llmtrain.eval.prompts.encode import Encoding, GenerationLimits, Ids, Prompt
from llmtrain.eval.prompts.few_shot import SEED, lm_eval_first, lm_eval_sample
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import (
    Choices,
    Continuation,
    Document,
    Instructed,
    Question,
    Schema,
    asked_and_answered,
)
from llmtrain.eval.tasks.sections import LmEvalPrompting


class LmEvalWriter:
    """Writes the prompts of one category's documents.

    spaced: put the delimiter between context and continuation of a language modelling document if there is no white space.
        The harness does not, because its tasks write the space into their target; plain records need not.
    style: plain text, or a chat template.
    bad: takes the reasons of documents whose prompt the template refuses, by index; otherwise the first is an EvalError.
    """

    def __init__(
        self,
        settings: LmEvalPrompting,
        spaced: bool = False,
        style: PromptStyle = PLAIN,
        bad: dict[int, str] | None = None,
    ):
        self._settings, self._spaced, self._style, self._bad = settings, spaced, style, bad

    def prompts(
        self, documents: Sequence[Document], pool: Sequence[Document], shots: int, in_pool: bool
    ) -> Iterator[Prompt]:
        """Prompts of the documents. pool: documents to draw examples from; in_pool: it holds the documents themselves."""
        rng = Random(SEED)
        for document in documents:
            before = self._style.system_turns(document.preamble, self._settings.example_delimiter)
            if shots:
                excluded = document if self.excludes_document(in_pool) else None
                first = self._settings.sampler == "first_n"
                chosen = lm_eval_first(pool, shots, excluded) if first else lm_eval_sample(rng, pool, shots, excluded)
                for one in chosen:
                    before += self._example(one)
            try:
                made = list(self._prompts(document, before))
            except EvalError as error:
                if self._bad is None or isinstance(error, LimitExceeded):
                    raise EvalError(f"{document.where}: {error}") from None
                self._bad[document.index] = str(error)
                continue
            yield from made

    def excludes_document(self, in_pool: bool) -> bool:
        """True if one more example is drawn and the document itself is dropped."""
        return in_pool if self._settings.avoid_document is None else self._settings.avoid_document

    def _example(self, document: Document) -> list[Turn]:
        asked, answer = asked_and_answered(document.content)
        settings = self._settings
        return question_turns(
            asked, answer, delimiter=settings.continuation_delimiter, example_delimiter=settings.example_delimiter
        )

    def _prompts(self, document: Document, before: list[Turn]) -> Iterator[Prompt]:
        def context(question: str, before: list[Turn] = before) -> str:
            return self._style.prompt([*before, *question_turns(question)])

        delimiter = self._style.delimiter(self._settings.continuation_delimiter)
        match content := document.content:
            case Choices():
                asked, continuations = context(content.query), [delimiter + choice for choice in content.choices]
                for option, continuation in enumerate(continuations):
                    yield Prompt(document, option, asked, continuation)
                if document.premise is not None:
                    asked = document.premise and context(document.premise, [])
                    for option, continuation in enumerate(continuations, len(continuations)):
                        yield Prompt(document, option, asked, continuation, premise=True)
            case Schema():
                for option, one in enumerate(content.contexts):
                    yield Prompt(document, option, context(one), delimiter + content.continuation)
            case Continuation():
                glued = content.context[-1:].strip() and content.continuation[:1].strip()
                between = delimiter if self._spaced and glued else ""
                yield Prompt(document, 0, context(content.context), between + content.continuation)
            case Question() | Instructed():
                yield Prompt(document, 0, context(content.context), None)

    def generation_limits(self, documents: Sequence[Document], tokenizer: PromptTokenizer) -> GenerationLimits:
        return GenerationLimits(tuple(self._settings.ends), self._settings.max_new_tokens)


def _with_moved_space(prompt: Prompt) -> tuple[str, str]:
    """(context, continuation) with the context's final white space moved to the continuation."""
    assert prompt.continuation is not None
    context = prompt.context.rstrip()
    return context, prompt.context[len(context) :] + prompt.continuation


def _texts(prompt: Prompt, tokenizer: PromptTokenizer) -> tuple[Sequence[str], Sequence[str]]:
    if prompt.continuation is None:
        texts = [prompt.context]
    elif prompt.context:
        context, continuation = _with_moved_space(prompt)
        texts = [context, context + continuation]
    else:
        return [prompt.continuation], []
    begin = _own_begin(prompt, tokenizer)
    return [text for text in texts if text.startswith(begin)], [text for text in texts if not text.startswith(begin)]


def _own_begin(prompt: Prompt, tokenizer: PromptTokenizer) -> str | tuple[()]:
    """Text of BOS (of EOS for want of one where a continuation is scored). A text that begins with it gets no special tokens."""
    return tokenizer.prefix_token if prompt.continuation is not None else tokenizer.bos_token or ()


def _join(prompt: Prompt, plain: Ids, special: Ids, tokenizer: PromptTokenizer) -> tuple[list[int], list[int]]:
    def ids_of(text: str) -> list[int]:
        return (plain if text.startswith(_own_begin(prompt, tokenizer)) else special)[text]

    if prompt.continuation is None:
        return ids_of(prompt.context), []
    if not prompt.context:
        ids = plain[prompt.continuation]
        return ([tokenizer.prefix_id], ids) if ids[:1] != [tokenizer.prefix_id] else (ids[:1], ids[1:])
    context, continuation = _with_moved_space(prompt)
    ids = ids_of(context)
    return ids, ids_of(context + continuation)[len(ids) :]


ENCODING = Encoding(_texts, _join)
