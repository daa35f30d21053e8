"""Rewards and advantages of the answers of a rollout."""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence

import torch

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.objectives.policy.losses import advantages
from llmtrain.objectives.policy.rewards import RewardProcess
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.train.rollouts.answers import Answer


class Rewarder(contextlib.ExitStack):
    """The rewards of a run, each with a process. `failures`: numbers of answers that have none, by reason. Raises UserError for a
    reward that cannot be made."""

    def __init__(self, section: PolicySection, tokenizer: TextTokenizer):
        super().__init__()
        self.section, self.tokenizer, self.ends = section, tokenizer, frozenset(tokenizer.end_ids)
        self.failures: Counter[str] = Counter()
        self.processes = [(one, self.enter_context(RewardProcess(one))) for one in section.rewards]

    def reward(self, group: Sequence[Answer], reference: str) -> None:
        """Set the rewards of a group; it is set aside where one of its answers has none. reference: the data's own answer."""
        prompt = self.tokenizer.decode(group[0].prompt)
        record = {"prompt": prompt, "answer": reference, "sample": group[0].sample}
        for answer in group:
            answer.reward = self._reward(self.text(answer), record) + self._punishment(answer)
            if math.isnan(answer.reward):
                for one in group:
                    one.reward = math.nan
                return

    def text(self, answer: Answer) -> str:
        ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in self.ends else answer.ids
        return self.tokenizer.decode(ids)

    def _reward(self, text: str, record: dict[str, object]) -> float:
        total = 0.0
        for section, process in self.processes:
            [found] = process.score([(text, record)])
            if math.isnan(found):
                self.failures.update({f"{section.name}: {reason}": n for reason, n in process.failures.items()})
                process.failures.clear()
                return math.nan
            total += section.weight * found
        return total if math.isfinite(total) else math.nan

    def _punishment(self, answer: Answer) -> float:
        """DAPO's (arXiv:2503.14476, equation 13): 0 up to max_new_tokens - margin, then down to -1."""
        margin = self.section.over_long_margin
        if margin is None:
            return 0.0
        return -max(0, len(answer.ids) - (self.section.max_new_tokens - margin)) / margin


def set_advantages(groups: Sequence[Sequence[Answer]], section: PolicySection) -> None:
    """Advantages of rewarded groups, of all ranks where `scale` is batch."""
    rewards = torch.tensor([[answer.reward for answer in group] for group in groups], dtype=torch.float64)
    found, _ = advantages(rewards, section.scale)
    for group, row in zip(groups, found.tolist(), strict=True):
        for answer, advantage in zip(group, row, strict=True):
            answer.advantage = advantage
