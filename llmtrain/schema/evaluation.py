"""The section `eval` of the YAML: validation, tasks and samples during training. No torch here."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from llmtrain.config.base import Duration, DurationField, NonNegativeFloat, PositiveInt, Problem, Section, free
from llmtrain.config.texts import PathText


class InContextConfig(Section):
    """In-context-learning tasks during training."""

    file: PathText = free()
    """An eval YAML, such as eval/quick.yaml: its tasks, gauntlet, convention, data_dir and limit count, its models do not."""
    interval: DurationField = free(Duration(1000, "steps"))
    """Time from one scoring to the next; the last step is always followed by one."""
    keep_answers: PositiveInt | None = free(5)
    """Keep, in RUN/icl/step-N/documents, the answers of this many evaluations, the newest; null: of all. Results are all kept."""

    def problems(self) -> Iterator[Problem]:
        if self.interval.value <= 0:
            yield self.problem_at("interval", "must be positive")


class SamplesConfig(Section):
    """Text that the model writes during training: before the first step, at each interval and after the last step, to the terminal,
    RUN/samples.jsonl and the loggers."""

    interval: DurationField = free(Duration(100, "steps"))
    """Time from one to the next."""
    prompts: list[str] = free([])
    """Texts to continue."""
    questions: Annotated[int, Field(ge=0, le=100_000)] = free(0)
    """Conversations of the validation data whose last answer is written, and compared: `samples/exact_match` is the share that is
    right to the letter."""
    max_new_tokens: PositiveInt = free(64)
    """Tokens to write for each."""
    temperature: NonNegativeFloat = free(0.0)
    """0 takes the likeliest token."""

    def problems(self) -> Iterator[Problem]:
        if self.interval.value <= 0:
            yield self.problem_at("interval", "must be positive")
        if not self.prompts and not self.questions:
            yield Problem("prompts", None, "give prompts, or a number of questions of the validation data")


class EvalConfig(Section):
    """Validation loss during training."""

    interval: DurationField = free(Duration(500, "steps"))
    """Time from one validation to the next."""
    max_samples: PositiveInt | None = free(None)
    """Validate on the first samples only."""
    microbatch_size: PositiveInt | None = free(None)
    """Sequences per forward pass on one rank. Default: train.microbatch_size."""
    prompt: str | None = free(None)
    """Text for the model to continue when the run ends."""
    icl: InContextConfig | None = free(None)
    """Also score in-context-learning tasks."""
    samples: SamplesConfig | None = free(None)
    """Also show text that the model writes."""

    def problems(self) -> Iterator[Problem]:
        if self.interval.value <= 0:
            yield self.problem_at("interval", "must be positive")
