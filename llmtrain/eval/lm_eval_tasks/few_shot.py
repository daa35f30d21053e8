"""Prompts as lm-evaluation-harness 0.4.13 writes them: description, few-shot examples and the document, as turns of a talk.

Its choice of examples, which scores depend on: fewshot_split is drawn from without the document itself only where it is
test_split, or where the task names neither. A task with a test_split and no other may get the document as its own example,
with its answer. `llmtrain`'s own tasks never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.config import Settings
from llmtrain.eval.lm_eval_tasks.documents import LmEvalDocument
from llmtrain.eval.prompts.chat import PromptStyle, Turn, question_turns
from llmtrain.eval.prompts.few_shot import SEED, check_pool, lm_eval_first, lm_eval_sample


def excludes_document(settings: Settings) -> bool:
    """True if one more example is drawn and the document itself is dropped."""
    return settings.examples.split == settings.test_split


def check_examples(settings: Settings, pool: Sequence[LmEvalDocument], shots: int) -> None:
    """Check the number of examples; raises EvalError for fewer than needed."""
    check_pool(settings.task, len(pool), shots, excludes_document(settings), None)


class PromptWriter:
    """Writer of the prompts of documents, in order: one generator draws the examples of all of them."""

    def __init__(self, settings: Settings, pool: Sequence[LmEvalDocument], shots: int, style: PromptStyle):
        self._settings, self._pool, self._shots, self._style = settings, pool, shots, style
        self._rng = Random(SEED)

    def contexts(self, document: LmEvalDocument) -> list[str]:
        """Prompts up to the answer: one, or one for each choice where those are contexts."""
        settings, fields, record = self._settings, document.fields, document.record
        turns = self._style.system_turns(fields.description(record) or "", settings.fewshot_delimiter)
        for example in self._examples(document):
            turns += self._example(example)
        prefix = fields.prefix(record, settings.gen_prefix)
        if fields.several_contexts:
            questions = [_turns(choice, None, prefix, "", "") for choice in fields.choices(record)]
        else:
            questions = [_turns(fields.text(record), None, prefix, settings.target_delimiter, "")]
        return [self._style.prompt([*turns, *question]) for question in questions]

    def _examples(self, document: LmEvalDocument) -> Sequence[LmEvalDocument]:
        excluded = document if excludes_document(self._settings) else None
        if not self._shots:
            return []
        if self._settings.examples.sampler == "first_n":
            return lm_eval_first(self._pool, self._shots, excluded)
        return lm_eval_sample(self._rng, self._pool, self._shots, excluded)

    def _example(self, example: LmEvalDocument) -> list[Turn]:
        own, fields, record = self._settings.examples, example.fields, example.record
        try:
            asked, answer = fields.text(record, own.doc_to_text), fields.target(record, own.doc_to_target)
            choices = fields.choices(record, own.doc_to_choice) if own.doc_to_choice else None
            prefix = fields.prefix(record, own.gen_prefix, example=True)
            if fields.several_contexts:
                assert choices is not None
                asked, choices = choices[asked], None
            if answer == "":  # an empty choice is an answer, an empty text is none
                answer = None
            elif choices and isinstance(answer, int):
                answer = choices[answer]
            elif isinstance(answer, list):
                answer = answer[0]
            return _turns(asked, answer, prefix, own.target_delimiter, own.fewshot_delimiter)
        except (EvalError, IndexError, TypeError) as error:
            raise EvalError(f"its few-shot example {example.where}: {error}") from None


def _turns(asked: Any, answer: Any, prefix: str | None, target_delimiter: str, delimiter: str) -> list[Turn]:
    """Question and answer; without an answer, what it begins with. Raises EvalError for what is no text."""
    if not isinstance(asked, str):
        raise EvalError(f"`doc_to_text` gives {asked!r}; expected a text")
    if answer is not None and not isinstance(answer, str):
        raise EvalError(f"`doc_to_target` gives {answer!r}; expected a text, or the number of a choice")
    return question_turns(asked, answer, prefix=prefix, delimiter=target_delimiter, example_delimiter=delimiter)
