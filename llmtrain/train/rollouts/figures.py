"""Metrics of rollouts: rewards, lengths, groups set aside, and where the time of a run goes."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.train.rollouts.answers import Answer


class Figures:
    """Metrics of a run's rollouts; seconds are those of this session."""

    def __init__(self, section: PolicySection, ranks: int):
        self.section, self.ranks = section, ranks
        self.seconds: dict[str, float] = {}
        """Of this rank, of the rollout under way, by what takes them."""
        self._draw = 0.0
        self._began: float | None = None
        self._in_rollouts = self._step_began = self._trained_from = 0.0
        self._tokens = 0

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def begin_step(self) -> None:
        self._step_began = time.perf_counter()
        self._began = self._began or self._step_began

    def own_seconds(self) -> dict[str, float]:
        return dict(self.seconds)

    def seconds_of_all(self, found: Sequence[dict[str, float]]) -> None:
        """Seconds of all ranks."""
        self._draw = max(one.get("draw", 0.0) for one in found)
        self._reward = max(one.get("reward", 0.0) for one in found)

    def of_rollout(self, groups: Sequence[Sequence[Answer]]) -> dict[str, float]:
        """Metrics of a rollout of all ranks."""
        valid = [group for group in groups if group[0].valid]
        answers = [one for group in valid for one in group]
        found = {"rollout/set_aside": float(len(groups) - len(valid))}
        if answers:
            rewards = torch.tensor([[one.reward for one in group] for group in valid], dtype=torch.float64)
            lengths = torch.tensor([len(one.ids) for one in answers], dtype=torch.float64)
            found |= {
                "rollout/reward": float(rewards.mean()),
                "rollout/reward_std": float(rewards.std(dim=1).mean()),
                "rollout/equal_groups": float((rewards.amax(1) == rewards.amin(1)).double().mean()),
                "rollout/length": float(lengths.mean()),
                "rollout/longest": float(lengths.max()),
                "rollout/over_long": sum(one.over_long for one in answers) / len(answers),
            }
        drawn = sum(len(one.ids) for group in groups for one in group)
        if self._draw:
            found |= {
                "rollout/tokens_per_second": drawn / self._draw,
                "rollout/seconds": self._draw,
                "rollout/reward_seconds": self._reward,
            }
        self._draw = 0.0
        return found

    def end_rollout(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Called before a step trains answers, of this rank. Returns the share of the time that went into rollouts, and tokens per
        second of all ranks in the step before."""
        now = time.perf_counter()
        found: dict[str, float] = {}
        if self._tokens:
            seconds = self._step_began - self._trained_from
            found["policy/tokens_per_second"] = self._tokens * self.ranks / seconds
            assert self._began is not None
            found["rollout/share"] = self._in_rollouts / (self._step_began - self._began)
        self._in_rollouts += now - self._step_began
        self._trained_from, self._tokens = now, sum(len(one.prompt) + len(one.ids) for one in answers)
        self.seconds.clear()
        return found
