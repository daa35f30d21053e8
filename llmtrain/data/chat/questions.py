"""The question of a stored conversation: its tokens up to the last answer, and that answer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Question:
    """Tokens before the last answer of a held-out conversation, and the answer without the token that ends it; None of a prompt."""

    ids: list[int]
    answer: list[int] | None


def question_of(ids: Sequence[int], trained: np.ndarray, ends: Collection[int]) -> Question | None:
    """The question of a document. trained: bool, like ids, tokens of answers; ends: ids of tokens that end texts. None where
    nothing stands before the answer, or nothing is answered."""
    if not trained.any():
        return None
    end = int(np.flatnonzero(trained)[-1]) + 1
    before = np.flatnonzero(~trained[:end])
    begin = int(before[-1]) + 1 if len(before) else 0
    answer = list(ids[begin:end])
    answer = answer[: next((at for at, token in enumerate(answer) if token in ends), len(answer))]
    return Question(list(ids[:begin]), answer) if begin and answer else None
