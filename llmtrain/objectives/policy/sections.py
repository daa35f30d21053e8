"""The section `objective` of a policy that learns by rewards of its own answers, and those of its rewards and rollouts. No torch
here."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from llmtrain.config.base import (
    ByType,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Problem,
    Section,
    free,
)
from llmtrain.config.texts import PathText
from llmtrain.objectives.engine_rollout import EngineRollout
from llmtrain.objectives.section import ObjectiveSection

RewardName = Literal["exact", "regex", "math", "code", "function"]
_OF = {"pattern": "regex", "function": "function"}
"""The reward that a setting is of."""


class RewardSection(Section):
    """A reward of answers by name. The record is {prompt, answer, sample}: texts of the prompt and of the answer that the data has
    to it, and the number of the sample."""

    name: RewardName
    """exact: 1 where the answer without white space around it is the record's. regex: 1 where the last match's first group is (the
    whole match without groups). math: 1 where math-verify finds both equal. code: 1 where the answer's last fenced block (else the
    answer) runs with the record's answer behind it, tests in Python, in a process with limits. function: the number that
    MODULE:FUNCTION returns for (answer, record)."""
    pattern: str | None = None
    """Of regex: a regular expression."""
    function: str | None = None
    """Of function: MODULE:FUNCTION, looked for in the working directory too."""
    allow_code: bool = False
    """Allow code and function, which run code of the model's or of yours."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor in the sum of all rewards."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = free(10.0)
    """Time for one answer, whose group is set aside where it takes longer."""
    memory_gb: Annotated[float, Field(gt=0, le=4096)] = free(2.0)
    """Of code: memory of its process."""

    def problems(self) -> Iterator[Problem]:
        for setting, of in _OF.items():
            given = getattr(self, setting)
            if (given is None) == (self.name == of):
                yield Problem(setting, given, "is missing" if self.name == of else f"is of {of} alone")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                yield Problem("pattern", self.pattern, f"is no regular expression: {error}")
        if self.function is not None and not re.fullmatch(r"[\w.]+:\w+", self.function):
            yield Problem("function", self.function, "expected MODULE:FUNCTION")
        if self.name in ("code", "function") and not self.allow_code:
            whose = "the model's" if self.name == "code" else "yours"
            yield Problem("allow_code", False, f"{self.name} runs code of {whose}; true allows it")


def _parse_reward(value: Any) -> Any:
    """A mapping of a name alone too."""
    return {"name": value} if isinstance(value, str) else value


Rewards = Annotated[list[Annotated[RewardSection, BeforeValidator(_parse_reward)]], Field(min_length=1, max_length=32)]


class KLSection(Section):
    """Divergence from a reference model, measured at each token of an answer, and added to the loss."""

    beta: NonNegativeFloat = 0.04
    """Factor in the loss; 0: it is measured alone."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With r = p_reference / p at a token: k1: -log r; k2: (log r)^2 / 2; k3: r - 1 - log r."""
    importance: bool = True
    """Multiply it by the ratio of the policy's probabilities, which makes its gradient that of the expectation."""
    reference: PathText | None = None
    """A run's folder, a checkpoint, or a folder in Hugging Face format. Default: with adapters the model without them; else the
    weights of init_from."""


class ServerRollout(Section):
    """Answers by servers of OpenAI's completions API that hold the same weights, such as vLLM or `llmtrain serve`. They must
    report the log-probabilities of drawn tokens and take prompts as token ids."""

    type: Literal["openai"]
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] = free()
    """Address up to `/v1`."""
    model: Annotated[str, Field(min_length=1)] = free("llmtrain")
    """Name of the model there."""
    key_variable: str | None = free(None)
    """Environment variable that holds the server's key."""
    concurrency: PositiveInt = free(32)
    """Requests under way at a time, of a rank."""
    seconds: PositiveFloat = free(600.0)
    """Time for one answer, after which the run ends."""
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "sequence_mask"
    """Importance weights of answers drawn by other weights or kernels, p_trainer / p_server, of a token or of a whole answer: cut
    off at `most`, or 0 above it."""
    most: PositiveFloat = 3.0
    """Limit of these weights."""


class PolicySection(ObjectiveSection):
    """A policy that learns by rewards of its own answers: reinforcement learning. Each prompt is answered group_size times by the
    weights as they are; an answer's advantage is its reward less the mean of its group. A step trains train.global_batch_size
    answers, to global_batch_size / (group_size * epochs) prompts of the data, of which each sample holds one
    (data.prepare.packing: padded). The formulas are in llmtrain/objectives/policy/losses.py."""

    implementation: ClassVar[str] = "llmtrain.objectives.policy.objective:Policy"
    cuda_graphs_refusal: ClassVar[str | None] = "the length of answers differs between steps"
    parallel_refusals: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("context", "tensor", "expert"), "each rank draws answers of its own"),
        "pipeline": "answers are drawn by the whole model",
    }
    needs_documents: ClassVar[bool] = True
    trained_only: ClassVar[bool] = True
    has_z_loss: ClassVar[bool] = False
    packing: ClassVar[str | None] = "padded"

    type: Literal["policy"]
    loss: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo"] = "dapo"
    """grpo: mean over answers of the mean over their tokens (arXiv:2402.03300). bnpo: mean over the tokens of a microbatch.
    dr_grpo: sum over tokens / (answers * max_new_tokens) (arXiv:2503.20783). dapo: mean over the tokens of a step
    (arXiv:2503.14476). gspo: grpo with one ratio for each answer (arXiv:2507.18071)."""
    rewards: Rewards
    """Rewards, which are added up, by name or as mappings: `[exact, {name: regex, pattern: "= (\\\\d+)", weight: 0.5}]`."""
    group_size: Annotated[int, Field(ge=2, le=4096)] = 8
    """Answers to each prompt."""
    max_new_tokens: PositiveInt = 256
    """Most tokens of an answer."""
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of drawing; the policy is the distribution at this temperature, in the loss too."""
    scale: Literal["group", "group_biased", "batch", "none"] = "group"
    """Divisor of advantages: standard deviation of the group's rewards, with Bessel's correction or without (group_biased), of
    those of all groups of a step (batch), or none."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Ratios below 1 - clip_low have no gradient where the advantage is negative."""
    clip_high: Annotated[float, Field(gt=0, le=1e6)] = 0.2
    """Ratios above 1 + clip_high have none where it is positive. DAPO: 0.28; GSPO: 4e-4, and clip_low 3e-4."""
    kl: KLSection | None = None
    """Divergence from a reference; null: none is measured."""
    over_long: Literal["keep", "mask", "penalty"] = "keep"
    """Answers that reach max_new_tokens without an end. keep: rewarded as they are. mask: they are not trained, but their rewards
    count in their group (DAPO's filter). penalty: as keep, and answers longer than max_new_tokens - over_long_margin lose up to 1
    of their reward, in proportion (DAPO's soft punishment)."""
    over_long_margin: PositiveInt | None = None
    """Of penalty: tokens over which it grows."""
    steps_per_rollout: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Steps whose prompts are answered at once, by the weights before the first of them. The ratios of later ones differ from 1."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Times that each answer is trained on, within the steps of its rollout, whose number it divides."""
    rollout: Annotated[EngineRollout | ServerRollout, ByType("engine")] = free(EngineRollout())
    """What draws the answers."""
    keep_rollouts: PositiveInt | None = free(None)
    """Keep the newest so many rollouts in RUN/rollouts; null: all."""

    def problems(self) -> Iterator[Problem]:
        if (self.over_long == "penalty") != (self.over_long_margin is not None):
            yield Problem(
                "over_long_margin", self.over_long_margin, "must be given with over_long: penalty, and only then"
            )
        if self.over_long_margin is not None and self.over_long_margin > self.max_new_tokens:
            yield Problem(
                "over_long_margin", self.over_long_margin, f"must not exceed max_new_tokens ({self.max_new_tokens})"
            )
        if self.steps_per_rollout % self.epochs:
            yield Problem("epochs", self.epochs, f"must divide steps_per_rollout ({self.steps_per_rollout})")
        if isinstance(self.rollout, ServerRollout) and self.temperature != 1:
            text = "servers report log-probabilities at temperature 1, without which there are no importance weights; use 1"
            yield Problem("temperature", self.temperature, text)

    @property
    def trained_per_sample(self) -> int:
        return self.group_size * self.epochs

    @property
    def own_rollout(self) -> EngineRollout | None:
        return self.rollout if isinstance(self.rollout, EngineRollout) else None

    def answers_drawn(self, samples_per_step: int) -> int:
        return samples_per_step * self.steps_per_rollout * self.group_size

    def problems_beside(self, seq_len: int, has_beginning: bool) -> Iterator[Problem]:
        if self.kl is not None and self.kl.reference is None and not has_beginning:
            text = "has no default without adapters or init_from; name a checkpoint, or leave out kl"
            yield Problem("kl.reference", None, text)
        if self.max_new_tokens >= seq_len:
            text = f"leaves no room for a prompt in data.seq_len ({seq_len}), which holds both; use fewer, or longer sequences"
            yield Problem("max_new_tokens", self.max_new_tokens, text)
