"""Sampling of few-shot examples by the two conventions, both seeded with 1234.

One generator serves all documents in order, so a document's examples depend on the documents before it; the first n
documents of a task have the same examples whether or not more follow.
"""

from collections.abc import Iterable, Sequence
from random import Random
from typing import TypeVar

from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.documents import AnyDocument

SEED = 1234

D = TypeVar("D", bound=AnyDocument)


def foundry_sample(rng: Random, size: int, shots: int, document: int | None) -> Iterable[int]:
    """Indices of examples in a pool of `size`, without the index of the document itself (None: not in the pool).

    As in LLM Foundry: draw without replacement; if the document itself is among them, draw single ones until one is new.
    Its examples stand in the order of a Python set, which for whole numbers is the same in every CPython.
    """
    chosen = set(rng.sample(range(size), shots))
    if document in chosen:
        chosen.remove(document)
        another = document
        while another == document or another in chosen:
            another = rng.choice(range(size))
        chosen.add(another)
    return chosen


def lm_eval_sample(rng: Random, pool: Sequence[D], shots: int, document: D | None) -> list[D]:
    """Examples as lm-evaluation-harness samples them: with a document to exclude, draw one more, and drop what equals it.

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


def lm_eval_first(pool: Sequence[D], shots: int, document: D | None) -> list[D]:
    """First examples of the pool, without the document itself."""
    chosen: list[D] = []
    for one in pool:
        if len(chosen) == shots:
            break
        if document is None or one.record != document.record:
            chosen.append(one)
    if document is not None:
        _check_others(len(chosen), shots, document)
    return chosen


def _check_others(count: int, shots: int, document: AnyDocument) -> None:
    if count < shots:
        raise EvalError(
            f"{document.where}: {shots} few-shot examples asked for, but only {count} records differ from this one"
        )


def check_pool(task: str, size: int, shots: int, in_pool: bool, category: str | None) -> None:
    """Check that there are enough examples; raises EvalError. in_pool: the document itself is in the pool."""
    if shots > size - in_pool:
        where = f" of category {category!r}" if category is not None else ""
        raise EvalError(
            f"task {task}: {shots} few-shot examples asked for, but there are only {size - in_pool}"
            f"{' besides the document itself' if in_pool else ''}{where}; lower the number of shots"
        )
