"""lm-evaluation-harness's convention, version 0.4.13: how its tasks write prompts and its `hf` model tokenises them.

Context and continuation are tokenised together, and the context alone; the continuation's tokens are what the first
has beyond the length of the second. White space at the end of the context goes to the continuation. An empty context
becomes BOS, or EOS for want of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from llmtrain.eval.prompts.encode import Encoding, Generation, Ids, Prompt
from llmtrain.eval.prompts.few_shot import SEED, lm_eval_first, lm_eval_sample
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import Choices, Continuation, Document, Question, Schema
from llmtrain.eval.tasks.sections import LmEvalPrompting


class LmEvalWriter:
    """Writes the prompts of one category's documents.

    spaced: put the delimiter where context and continuation of a language modelling document would run together. The
        harness never does: its tasks write the space into their target, but plain records need not.
    """

    def __init__(self, style: LmEvalPrompting, spaced: bool = False):
        self._style, self._spaced = style, spaced

    def prompts(
        self, documents: Sequence[Document], pool: Sequence[Document], shots: int, own: bool
    ) -> Iterator[Prompt]:
        """pool: where examples come from; own: it holds the documents themselves."""
        rng = Random(SEED)
        for document in documents:
            before = document.preamble
            if shots:
                avoided = document if self.avoids(own) else None
                first = self._style.sampler == "first_n"
                chosen = lm_eval_first(pool, shots, avoided) if first else lm_eval_sample(rng, pool, shots, avoided)
                before += "".join(self._example(one) for one in chosen)
            yield from self._prompts(document, before)

    def avoids(self, own: bool) -> bool:
        """Whether one example more is drawn and the document itself left out."""
        return own if self._style.avoid_document is None else self._style.avoid_document

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
        return asked + self._style.continuation_delimiter + answer + self._style.example_delimiter

    def _prompts(self, document: Document, before: str) -> Iterator[Prompt]:
        delimiter = self._style.continuation_delimiter
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

    def generation(self, documents: Sequence[Document], tokenizer: PromptTokenizer) -> Generation:
        return Generation(tuple(self._style.ends), self._style.max_new_tokens)


def _moved(prompt: Prompt) -> tuple[str, str]:
    """(context, continuation) after white space has moved."""
    assert prompt.continuation is not None
    context = prompt.context.rstrip()
    return context, prompt.context[len(context) :] + prompt.continuation


def _texts(prompt: Prompt) -> tuple[Sequence[str], Sequence[str]]:
    if prompt.continuation is None:
        return [], [prompt.context]
    if not prompt.context:
        return [prompt.continuation], []
    context, continuation = _moved(prompt)
    return [], [context, context + continuation]


def _join(prompt: Prompt, plain: Ids, special: Ids, tokenizer: PromptTokenizer) -> tuple[list[int], list[int]]:
    if prompt.continuation is None:
        return special[prompt.context], []
    if not prompt.context:
        ids = plain[prompt.continuation]
        return ([tokenizer.prefix_id], ids) if ids[:1] != [tokenizer.prefix_id] else (ids[:1], ids[1:])
    context, continuation = _moved(prompt)
    ids = special[context]
    return ids, special[context + continuation][len(ids) :]


ENCODING = Encoding(_texts, _join)
