"""Answers by the generation engine, with the weights that are trained."""

import hashlib
from collections.abc import Collection, Sequence

from llmtrain.generate.engine import Engine
from llmtrain.generate.options import Sampling
from llmtrain.generate.request import Request
from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.policy.sections import PolicySection
from llmtrain.schema.config import Config
from llmtrain.train.rollouts.answers import Answer
from llmtrain.train.rollouts.copied_weights import CopiedWeights


class EngineSource:
    """Draws answers by the model itself. An answer depends on the run's seed, its step, its sample and its number in the group: not
    on ranks, nor, with `deterministic`, on the answers beside it. gathers: draws by the trained model itself."""

    def __init__(
        self,
        config: Config,
        trained: CausalLM,
        ends: Collection[int],
        answers: int,
    ):
        """config: without `auto`, of a policy that draws its own answers. trained: with its weights. answers: of this rank in a
        rollout. Raises UserError when the model's learned positions end before data.seq_len."""
        assert isinstance(config.objective, PolicySection)
        rollout, seq_len = config.objective.own_rollout, config.data.seq_len
        assert rollout is not None
        self.section, self.ends, self.seed = config.objective, frozenset(ends), config.seed
        self.copied = CopiedWeights(config, trained) if rollout.weights == "copied" else None
        self.gathers = self.copied is None
        self.engine = Engine(
            trained if self.copied is None else self.copied.model,
            rows=min(rollout.rows, answers),
            max_len=seq_len,
            piece=min(512, max(16, seq_len // 16)) if rollout.prefix_mb else None,
            prefix_bytes=int(rollout.prefix_mb * 1e6),
            deterministic=config.train.deterministic,
        )

    def draw(self, groups: Sequence[list[Answer]]) -> None:
        """Fill in the answers to the prompts of some groups. Every rank calls it, within `gathered` where it `gathers`."""
        if self.copied is not None:
            self.copied.refresh()
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
