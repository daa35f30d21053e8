"""Which examples stand before a document: the two conventions' ways to choose them, both seeded with 1234.

Both draw for one document after the other from one generator, so a document's examples depend on the documents before
it; the first n documents of a task have the same examples whether or not more follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.documents import Document

SEED = 1234


def foundry_sample(rng: Random, size: int, shots: int, own: int | None) -> Iterable[int]:
    """Numbers of the examples among `size`, none of them the document's `own`.

    As LLM Foundry: draw without replacement; if the document itself is among them, draw single ones until one is new.
    Its examples stand in the order of a Python set, which for whole numbers is the same in every CPython.
    """
    chosen = set(rng.sample(range(size), shots))
    if own in chosen:
        chosen.remove(own)
        another = own
        while another == own or another in chosen:
            another = rng.choice(range(size))
        chosen.add(another)
    return chosen


def lm_eval_sample(rng: Random, pool: Sequence[Document], shots: int, document: Document | None) -> list[Document]:
    """As lm-evaluation-harness: with a document to avoid, draw one more, and drop what equals it.

    Equality is of records: a second copy of the document is not used either; if that leaves too few, all are drawn anew
    from the records that differ.
    """
    if document is None:
        return rng.sample(pool, shots)
    drawn = [one for one in rng.sample(pool, shots + 1) if one.record != document.record][:shots]
    if len(drawn) < shots:
        others = [one for one in pool if one.record != document.record]
        _check_others(len(others), shots, document)
        drawn = rng.sample(others, shots)
    return drawn


def lm_eval_first(pool: Sequence[Document], shots: int, document: Document | None) -> list[Document]:
    """The first examples, without the document itself."""
    chosen: list[Document] = []
    for one in pool:
        if len(chosen) == shots:
            break
        if document is None or one.record != document.record:
            chosen.append(one)
    if document is not None:
        _check_others(len(chosen), shots, document)
    return chosen


def _check_others(count: int, shots: int, document: Document) -> None:
    if count < shots:
        raise EvalError(
            f"{document.where}: {shots} few-shot examples asked for, but only {count} records differ from this one"
        )


def check_pool(task: str, size: int, shots: int, own: bool, category: str | None) -> None:
    """Raises EvalError when there are not enough examples. own: the document itself is in the pool."""
    if shots > size - own:
        where = f" of category {category!r}" if category is not None else ""
        raise EvalError(
            f"task {task}: {shots} few-shot examples asked for, but there are only {size - own}"
            f"{' besides the document itself' if own else ''}{where}; lower the number of shots"
        )
