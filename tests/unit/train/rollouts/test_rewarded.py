"""Rewards of groups: sums of several, punishments of length, groups that are set aside, and their batch."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.models.loss import IGNORE
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.train.rollouts import rollouts
from llmtrain.train.rollouts.answers import Answer, answers_batch
from llmtrain.train.rollouts.rollouts import Rewarder, set_advantages


class Letters:
    """A tokenizer of letters, of which `.` ends texts."""

    end_ids = (ord("."),)

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def section(**settings: Any) -> PolicySection:
    given = {"type": "policy", "rewards": ["exact"], "group_size": 2, "max_new_tokens": 8}
    return PolicySection.model_validate(given | settings)


def group(*texts: str) -> list[Answer]:
    return [Answer(0, 0, [ord("?")], list(map(ord, text)), [-1.0] * len(text)) for text in texts]


def rewards(of: PolicySection, answers: list[Answer], reference: str = "42") -> list[float]:
    with Rewarder(of, Letters()) as rewarder:  # type: ignore[arg-type]
        rewarder.reward(answers, reference)
    return [one.reward for one in answers]


def test_rewards_are_added_up_by_their_weights():
    of = section(rewards=["exact", {"name": "regex", "pattern": r"\d+", "weight": 0.5}])
    assert rewards(of, group("42.", "is 42", "41.")) == [1.5, 0.5, 0]


def test_long_answers_are_punished_in_proportion():
    of = section(over_long="penalty", over_long_margin=4)
    assert rewards(of, group("42.", "1234", "12345.", "12345678")) == [1, 0, -0.5, -1]


def test_a_group_with_an_answer_without_a_reward_is_set_aside(monkeypatch: pytest.MonkeyPatch):
    asked = []

    class Failing:
        def __init__(self, _: object):
            self.failures: dict[str, int] = {}

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def score(self, answers: list[tuple[str, Any]]) -> list[float]:
            asked.append(answers[0][0])
            self.failures = {"took too long": 1} if answers[0][0] == "b" else {}
            return [math.nan if answers[0][0] == "b" else 1.0]

    monkeypatch.setattr("llmtrain.train.rollouts.rollouts.RewardProcess", Failing)
    with Rewarder(section(), Letters()) as rewarder:  # type: ignore[arg-type]
        answers = group("a", "b", "c")
        rewarder.reward(answers, "")
        assert asked == ["a", "b"] and not any(one.valid for one in answers), "what follows is not asked for"
        assert rewarder.failures == {"exact: took too long": 1}


def test_advantages_are_of_valid_groups_alone():
    good, bad = group("a", "b"), group("c", "d")
    good[0].reward, good[1].reward, bad[0].reward = 1.0, 0.0, 1.0
    set_advantages([good, bad], section(scale="none"))
    assert [one.advantage for one in good + bad] == [0.5, -0.5, 0, 0]


def test_the_batch_has_labels_where_answers_are_trained():
    answers = group("ab.", "abcd", "x.")
    for one in answers[:2]:
        one.reward = 1.0
    answers[1].over_long = True
    batch = answers_batch(answers, 20, mask_over_long=True)
    trained = batch["labels"] != IGNORE
    assert batch["input_ids"].shape == (3, 16) and trained.sum(1).tolist() == [3, 0, 0]
    assert batch["labels"][0, :3].tolist() == list(map(ord, "ab."))
    assert batch["valid"].tolist() == [True, True, False]
    assert batch["document_ids"].sum(1).tolist() == [12, 11, 13]
    assert torch.equal(batch["sampled_log_p"][0, :4], torch.tensor([-1.0, -1, -1, 0]))
    assert answers_batch(answers, 20, mask_over_long=False)["labels"].ne(IGNORE).sum(1).tolist() == [3, 4, 0]
    assert answers_batch(answers, 20, True, masked=False)["labels"].ne(IGNORE).sum(1).tolist() == [3, 4, 2]
    assert answers_batch(answers, 9, True)["input_ids"].shape == (3, 9)  # learned positions end with seq_len
    none_fits = answers_batch([Answer(7, 0, [])] * 2, 20, True)
    assert none_fits["input_ids"].shape == (2, 16) and none_fits["labels"].eq(IGNORE).all()


def test_reasons_without_end_are_named_up_to_a_number(monkeypatch: pytest.MonkeyPatch):
    """As of a reward that raises with the answer in its text."""
    said: list[str] = []
    monkeypatch.setattr(rollouts.run_log, "warning", said.append)
    run: Any = SimpleNamespace(named=set(), world=SimpleNamespace(is_main=True))
    for step in range(30):
        rollouts.Rollouts._report(run, step, Counter({f"no number: {step}": 2, "too long": 1}))
    assert said[:2] == [
        "WARNING: step 1: groups set aside, 2: no number: 0",
        "WARNING: step 1: groups set aside, 1: too long",
    ]
    assert len(said) == rollouts.MOST_REASONS + 1
    assert said[-1] == "WARNING: step 20: further reasons are not named; rollout/set_aside counts them"
    assert len(run.named) == rollouts.MOST_REASONS + 1
