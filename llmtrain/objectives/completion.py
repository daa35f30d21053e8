"""Prediction of the trained tokens of conversations: of answers, by the marks that `llmtrain prepare` stores beside the tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torchmetrics import Metric

from llmtrain.objectives.next_token import NatsPerToken, NextToken
from llmtrain.objectives.sections import CompletionSection, NextTokenSection


@dataclass(frozen=True)
class Completion(NextToken):
    """NextToken with labels at trained tokens alone, to which the loader restricts them (`trained_only`): the mean is over those of
    the whole step."""

    section: NextTokenSection | CompletionSection = CompletionSection(type="completion")  # noqa: RUF009 (frozen)
    count_name: ClassVar[str | None] = "tokens/trained"

    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """`cross_entropy` over trained tokens, and `STREAM/cross_entropy`."""
        found: dict[str, Metric] = {"cross_entropy": NatsPerToken()}
        return found | {f"{name}/cross_entropy": NatsPerToken(ids) for name, ids in streams.items()}
