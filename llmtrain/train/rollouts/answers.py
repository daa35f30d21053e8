"""Answers of a rollout, and the batch that is trained of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmtrain.models.loss import IGNORE
from llmtrain.objectives.policy.objective import ADVANTAGE, OLD, SAMPLED, VALID

_UNIT = 16
"""Sequences are filled to a multiple of so many tokens, or to seq_len, so that few lengths occur."""


@dataclass
class Answer:
    """An answer to a sample's prompt. step: that trains it first, from 0. ids: with the token that ends it, where one did.
    log_p: of each, by what drew it, NaN where it is not known. over_long: it has as many tokens as it may have, and no end.
    reward: NaN of a group that was set aside."""

    sample: int
    step: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    log_p: list[float] = field(default_factory=list)
    over_long: bool = False
    reward: float = float("nan")
    advantage: float = 0.0
    old: list[float] = field(default_factory=list)
    """Of each, by the weights with which the rollout began; empty where a rollout is of one step."""

    @property
    def valid(self) -> bool:
        return self.reward == self.reward


def answers_batch(answers: Sequence[Answer], seq_len: int, mask_over_long: bool, masked: bool = True) -> dict[str, Any]:
    """The batch of some answers in host memory: input_ids, labels, document_ids [n, T], T at most seq_len, and the columns of
    objective.py. A group that was set aside has no labels. mask_over_long: nor have answers that are over long. masked: false
    gives all of them labels."""
    longest = max((1, *(len(one.prompt) + len(one.ids) for one in answers)))  # none has tokens where no prompt fits
    length, count = min(-(-longest // _UNIT) * _UNIT, seq_len), len(answers)
    ids, documents = torch.zeros(count, length, dtype=torch.int64), torch.ones(count, length, dtype=torch.int32)
    labels = torch.full((count, length), IGNORE, dtype=torch.int64)
    sampled, old = torch.zeros(count, length), torch.zeros(count, length)
    for row, one in enumerate(answers):
        begin, end = len(one.prompt), len(one.prompt) + len(one.ids)
        ids[row, :end] = torch.tensor([*one.prompt, *one.ids])
        documents[row, :end] = 0
        if begin == 0 or not one.ids:
            continue
        at = slice(begin - 1, end - 1)  # a label stands at the token before it
        if not masked or (one.valid and not (one.over_long and mask_over_long)):
            labels[row, at] = ids[row, begin:end]
        sampled[row, at] = torch.tensor(one.log_p)
        if one.old:
            old[row, at] = torch.tensor(one.old)
    return {
        "input_ids": ids,
        "labels": labels,
        "document_ids": documents,
        "sample_ids": torch.tensor([one.sample for one in answers], dtype=torch.int64),
        ADVANTAGE: torch.tensor([one.advantage for one in answers], dtype=torch.float32),
        VALID: torch.tensor([one.valid for one in answers], dtype=torch.bool),
        SAMPLED: sampled,
        OLD: old,
    }
