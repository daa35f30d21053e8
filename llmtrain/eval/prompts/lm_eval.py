"""Prompts as the tasks of lm-evaluation-harness 0.4.13 write them and its `hf` model tokenises them.

Context and continuation are tokenised together, and the context alone; the tokens of the first beyond the length of the
second are the continuation's. White space at the end of the context is moved to the continuation. An empty context
becomes BOS, or EOS for tokenizers without BOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from llmtrain.eval.prompts.encode import Encoding, GenerationLimits, Ids, Prompt
from llmtrain.eval.prompts.few_shot import SEED, lm_eval_first, lm_eval_sample
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import Choices, Continuation, Document, Question, Schema
from llmtrain.eval.tasks.sections import LmEvalPrompting


class LmEvalWriter:
    """Writes the prompts of one category's documents.

    spaced: put the delimiter between context and continuation of a language modelling document if there is no white space.
        The harness does not, because its tasks write the space into their target; plain records need not.
    """

    def __init__(self, settings: LmEvalPrompting, spaced: bool = False):
        self._settings, self._spaced = settings, spaced

    def prompts(
        self, documents: Sequence[Document], pool: Sequence[Document], shots: int, in_pool: bool
    ) -> Iterator[Prompt]:
        """Prompts of the documents. pool: documents to draw examples from; in_pool: it holds the documents themselves."""
        rng = Random(SEED)
        for document in documents:
            before = document.preamble
            if shots:
                excluded = document if self.excludes_document(in_pool) else None
                first = self._settings.sampler == "first_n"
                chosen = lm_eval_first(pool, shots, excluded) if first else lm_eval_sample(rng, pool, shots, excluded)
                before += "".join(self._example(one) for one in chosen)
            yield from self._prompts(document, before)

    def excludes_document(self, in_pool: bool) -> bool:
        """True if one more example is drawn and the document itself is dropped."""
        return in_pool if self._settings.avoid_document is None else self._settings.avoid_document

    def _example(self, document: Document) -> str:
        match content := document.content:
            case Choices():
                asked, answer = content.query, content.choices[content.gold]
            case Schema():
                asked, answer = content.contexts[content.gold], content.continuation
            case Continuation():
                asked, answer = content.context, content.continuation
            case Question():
                asked, answer = content.context, content.answer
            case _:
                raise AssertionError("a perplexity task has no examples")
        return asked + self._settings.continuation_delimiter + answer + self._settings.example_delimiter

    def _prompts(self, document: Document, before: str) -> Iterator[Prompt]:
        delimiter = self._settings.continuation_delimiter
        match content := document.content:
            case Choices():
                continuations = [delimiter + choice for choice in content.choices]
                for option, continuation in enumerate(continuations):
                    yield Prompt(document, option, before + content.query, continuation)
                if document.premise is not None:
                    for option, continuation in enumerate(continuations, len(continuations)):
                        yield Prompt(document, option, document.premise, continuation, premise=True)
            case Schema():
                for option, context in enumerate(content.contexts):
                    yield Prompt(document, option, before + context, delimiter + content.continuation)
            case Continuation():
                glued = content.context[-1:].strip() and content.continuation[:1].strip()
                between = delimiter if self._spaced and glued else ""
                yield Prompt(document, 0, before + content.context, between + content.continuation)
            case Question():
                yield Prompt(document, 0, before + content.context, None)

    def generation_limits(self, documents: Sequence[Document], tokenizer: PromptTokenizer) -> GenerationLimits:
        return GenerationLimits(tuple(self._settings.ends), self._settings.max_new_tokens)


def _with_moved_space(prompt: Prompt) -> tuple[str, str]:
    """(context, continuation) with the context's final white space moved to the continuation."""
    assert prompt.continuation is not None
    context = prompt.context.rstrip()
    return context, prompt.context[len(context) :] + prompt.continuation


def _texts(prompt: Prompt) -> tuple[Sequence[str], Sequence[str]]:
    if prompt.continuation is None:
        return [], [prompt.context]
    if not prompt.context:
        return [prompt.continuation], []
    context, continuation = _with_moved_space(prompt)
    return [], [context, context + continuation]


def _join(prompt: Prompt, plain: Ids, special: Ids, tokenizer: PromptTokenizer) -> tuple[list[int], list[int]]:
    if prompt.continuation is None:
        return special[prompt.context], []
    if not prompt.context:
        ids = plain[prompt.continuation]
        return ([tokenizer.prefix_id], ids) if ids[:1] != [tokenizer.prefix_id] else (ids[:1], ids[1:])
    context, continuation = _with_moved_space(prompt)
    ids = special[context]
    return ids, special[context + continuation][len(ids) :]


ENCODING = Encoding(_texts, _join)
