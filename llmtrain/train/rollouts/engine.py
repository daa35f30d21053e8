"""Answers by the generation engine, with the weights that are trained."""

import hashlib
from collections.abc import Collection, Sequence

from llmtrain.generate.engine import Engine, Request
from llmtrain.generate.options import Sampling
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.policy.sections import EngineRollout, PolicySection
from llmtrain.train.rollouts.answers import Answer


class EngineSource:
    """Draws answers by the model itself. An answer depends on the run's seed, its step, its sample and its number in the group: not
    on ranks, nor, with `deterministic`, on the answers beside it. seq_len: most tokens of a prompt and an answer together."""

    def __init__(
        self,
        section: PolicySection,
        model: CausalLM,
        ends: Collection[int],
        *,
        seed: int,
        answers: int,
        seq_len: int,
        deterministic: bool,
    ):
        """answers: of this rank in a rollout. Raises UserError when the model's learned positions end before seq_len."""
        rollout = section.rollout
        assert isinstance(rollout, EngineRollout)
        self.section, self.ends, self.seed = section, frozenset(ends), seed
        self.engine = Engine(
            model,
            rows=min(rollout.rows, answers),
            max_len=seq_len,
            piece=min(512, max(16, seq_len // 16)) if rollout.prefix_mb else None,
            prefix_bytes=int(rollout.prefix_mb * 1e6),
            deterministic=deterministic,
        )

    def draw(self, groups: Sequence[list[Answer]]) -> None:
        """Fill in the answers to the prompts of some groups. Within `gathered`."""
        self.engine.weights_changed()
        answers = [(answer, number) for group in groups for number, answer in enumerate(group)]
        requests = [
            Request(
                answer.prompt,
                self.section.max_new_tokens,
                Sampling(temperature=self.section.temperature, seed=draw_seed(self.seed, answer)),
                ends=self.ends,
                number=number,
            )
            for answer, number in answers
        ]
        for (answer, _), request in zip(answers, self.engine.run(requests), strict=True):
            answer.ids = request.ids
            answer.log_p = [token.log_likelihood for token in request.tokens]
            answer.over_long = request.end == "length"


def draw_seed(seed: int, answer: Answer) -> int:
    """Seed of an answer's group, below 2^40."""
    digest = hashlib.blake2b(f"{seed} {answer.step} {answer.sample}".encode(), digest_size=5)
    return int.from_bytes(digest.digest(), "big")
