"""Prompts as LLM Foundry's in-context-learning data sets write and tokenise them.

The text before a document (preamble and examples), the document's context, and its continuation are tokenised
separately; only the first gets special tokens. Details of the convention, as in llmfoundry 0.22:

- Fields are stripped, except lists (choices, context options, aliases); so is the end of a context. In return a
  continuation gets a leading space, if the tokenizer makes one token of " a".
- Examples keep the continuation delimiter as written and get no such space.
- A schema's context options get no continuation delimiter when nothing precedes them, and a stripped one otherwise;
  their prelimiter comes before the example delimiter.
"""

from collections.abc import Iterator, Sequence
from random import Random

from llmtrain.eval.prompts.encode import Encoding, GenerationLimits, Ids, Prompt
from llmtrain.eval.prompts.few_shot import SEED, foundry_sample
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import Choices, Continuation, Document, Question, Schema, asked_and_answered
from llmtrain.eval.tasks.sections import FoundryPrompting

_EXTRA_TOKENS = 10
"""Extra tokens of an answer with a chain of thought, beyond the longest of the data set."""


class FoundryWriter:
    """Writes the prompts of one category's documents."""

    def __init__(self, settings: FoundryPrompting, tokenizer: PromptTokenizer):
        self._settings = settings
        self._space = tokenizer.puts_space_into_words

    def prompts(
        self, documents: Sequence[Document], pool: Sequence[Document], shots: int, in_pool: bool
    ) -> Iterator[Prompt]:
        """Prompts of the documents. pool: documents to draw examples from; in_pool: it holds the documents themselves."""
        rng = Random(SEED)
        positions = {document.index: position for position, document in enumerate(pool)} if in_pool else {}
        for document in documents:
            before = document.preamble
            if shots:
                for number in foundry_sample(rng, len(pool), shots, positions.get(document.index)):
                    before += self._example(pool[number], before)
            yield from self._prompts(document, before)
            if isinstance(document.content, Choices) and document.premise is not None:
                yield from self._premises(document, document.content)

    def _stripped(self, text: str) -> str:
        return text.strip() if self._settings.strip else text

    def _prompts(self, document: Document, before: str) -> Iterator[Prompt]:
        content = document.content
        if isinstance(content, Schema):
            continuation = self._spaced(self._stripped(content.continuation))
            for option, context in enumerate(content.contexts):
                yield Prompt(document, option, self._option(context, before), continuation, before)
            return
        match content:
            case Choices():
                asked, continuations = content.query, [self._spaced(choice) for choice in content.choices]
            case Continuation():
                asked, continuations = content.context, [self._spaced(self._stripped(content.continuation))]
            case Question():
                asked, continuations = content.context, [None]
            case _:
                raise AssertionError("a perplexity task has no prompts")
        context = self._lead(before) + self._stripped(asked) + self._settings.continuation_delimiter
        # A prompt that ends in a space would ask for a token that begins without one.
        context = context.rstrip() if self._settings.strip else context
        for option, continuation in enumerate(continuations):
            yield Prompt(document, option, context, continuation, before)

    def _lead(self, before: str) -> str:
        return (self._settings.example_delimiter if before else "") + self._settings.prelimiter

    def _option(self, context: str, before: str) -> str:
        if not before:
            return self._settings.prelimiter + context
        delimiter = self._settings.continuation_delimiter
        delimiter = delimiter.rstrip() if self._settings.strip else delimiter
        return self._settings.prelimiter + self._settings.example_delimiter + context + delimiter

    def _premises(self, document: Document, content: Choices) -> Iterator[Prompt]:
        """Prompts of PMI scores: every choice after the premise alone; their options are numbered after the choices."""
        assert document.premise is not None
        premise = document.premise.rstrip() if self._settings.strip else document.premise
        for option, choice in enumerate(content.choices, len(content.choices)):
            yield Prompt(document, option, premise, self._spaced(choice), premise=True)

    def _spaced(self, text: str) -> str:
        return f" {text}" if self._space and not text.startswith(" ") else text

    def _example(self, document: Document, before: str) -> str:
        content, settings = document.content, self._settings
        if isinstance(content, Schema):
            delimiter = settings.example_delimiter if before else ""
            context = settings.prelimiter + delimiter + content.contexts[content.gold]
            return context + settings.continuation_delimiter + self._stripped(content.continuation)
        asked, answer = asked_and_answered(content)
        answer = answer if isinstance(content, Choices) else self._stripped(answer)
        if isinstance(content, Question) and content.chain_of_thought is not None:
            answer = self._stripped(content.chain_of_thought) + settings.cot_delimiter + answer
        return self._lead(before) + self._stripped(asked) + settings.continuation_delimiter + answer

    def generation_limits(self, documents: Sequence[Document], tokenizer: PromptTokenizer) -> GenerationLimits:
        """Limits of generated answers: as many tokens as the longest right answer has, with its chain of thought."""
        answers: set[str] = set()
        for document in documents:
            content = document.content
            assert isinstance(content, Question)
            reasoning = content.chain_of_thought
            lead = "" if reasoning is None else reasoning + self._settings.cot_delimiter
            answers.update(lead + answer for answer in (content.answer, *content.aliases))
        longest = max((len(ids) for ids in tokenizer.special_batch(sorted(answers))), default=0)
        room = _EXTRA_TOKENS if self._settings.cot_delimiter else 0
        return GenerationLimits(tuple(self._settings.ends), max(longest + room, 1))


def _texts(prompt: Prompt, tokenizer: PromptTokenizer) -> tuple[Sequence[str], Sequence[str]]:
    continuation = [] if prompt.continuation is None else [prompt.continuation]
    return [prompt.context, *continuation], [prompt.before]


def _join(prompt: Prompt, plain: Ids, special: Ids, tokenizer: PromptTokenizer) -> tuple[list[int], list[int]]:
    before = special[prompt.before]
    # Tokenizers that close a text with EOS must not do so in the middle of a prompt.
    if len(before) > 1 and before[-1] == tokenizer.eod_id:
        before = before[:-1]
    context = before + plain[prompt.context]
    if not context and prompt.premise:
        context = [tokenizer.prefix_id]
    return context, [] if prompt.continuation is None else plain[prompt.continuation]


ENCODING = Encoding(_texts, _join)
