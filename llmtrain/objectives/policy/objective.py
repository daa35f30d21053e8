"""A policy that learns by rewards: the loss of answers that were drawn and rewarded before the step (train/rollouts)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torchmetrics import Metric

from llmtrain.models.loss import IGNORE, LossOutput
from llmtrain.objectives.base import Batch, Objective, Outputs
from llmtrain.objectives.next_token import NatsPerToken, NextToken
from llmtrain.objectives.policy.losses import (
    PolicyLoss,
    divergence,
    importance_weights,
    is_clipped,
    reduced,
    token_losses,
)
from llmtrain.objectives.policy.sections import PolicySection, ServerRollout

ADVANTAGE, VALID = "advantage", "valid"
"""Columns of a batch: fp32 and bool, [batch]. An answer that is not valid, of a group that was set aside, counts nowhere."""
SAMPLED, OLD, REFERENCE = "sampled_log_p", "old_log_p", "reference_log_p"
"""Columns of a batch: fp32 [batch, T], log-probabilities of labels: by what drew them at temperature 1, NaN where they are not
known; by the weights with which the rollout began; and by the reference model."""


@dataclass(frozen=True)
class Policy(Objective):
    """Loss of answers, a sequence each: a prompt, an answer with labels, and padding, which is another document. Answers that are
    not trained (over_long: mask) have no labels, and count as answers.

    A batch without ADVANTAGE is of validation: its loss is the cross entropy of the answers that the data has.
    """

    section: PolicySection
    count_name: ClassVar[str | None] = "policy/answers"

    @property
    def columns(self) -> tuple[str, ...]:
        old = (OLD,) if self.section.steps_per_rollout > 1 else ()
        return "labels", ADVANTAGE, VALID, SAMPLED, *old, *((REFERENCE,) if self.section.kl is not None else ())

    def count(self, batch: Batch) -> int:
        """Valid answers."""
        return int(batch[VALID].sum()) if VALID in batch else NextToken().count(batch)

    def further_counts(self, batch: Batch) -> tuple[int, ...]:
        """Trained tokens."""
        return (int((batch["labels"] != IGNORE).sum()),)

    def example(self, tokens: Tensor) -> dict[str, Tensor]:
        zeros, ones = torch.zeros_like(tokens, dtype=torch.float32), torch.ones(len(tokens), device=tokens.device)
        made = {"labels": tokens, ADVANTAGE: ones, VALID: ones.bool(), SAMPLED: zeros, OLD: zeros, REFERENCE: zeros}
        made["document_ids"] = torch.zeros_like(tokens, dtype=torch.int32)
        return {name: made[name] for name in ("document_ids", *self.columns)}

    def log_p(self, outputs: Outputs, labels: Tensor) -> Tensor:
        """Log-probabilities of labels [batch, T] at the policy's temperature, 0 where there is none."""
        row, at = (labels != IGNORE).nonzero(as_tuple=True)
        found = outputs.model.label_likelihoods(
            outputs.hidden[row, at], outputs.head, labels[row, at], self.section.temperature
        )
        return torch.zeros(labels.shape, dtype=found.dtype, device=found.device).index_put((row, at), found)

    @property
    def settings(self) -> PolicyLoss:
        of, kl = self.section, self.section.kl
        made = PolicyLoss(of.loss, of.clip_low, of.clip_high, max_new_tokens=of.max_new_tokens)
        return made if kl is None else replace(made, beta=kl.beta, kl=kl.estimator, kl_ratio=kl.importance)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        if ADVANTAGE not in batch:
            return outputs.model.cross_entropy(outputs.hidden, outputs.head, batch["labels"])
        section, to, valid = self.section, self.settings, batch[VALID]
        mask = batch["labels"] != IGNORE
        log_p = self.log_p(outputs, batch["labels"])
        old = batch[OLD] if OLD in self.columns else log_p.detach()
        answers, tokens = batch["step_counts"] if "step_counts" in batch else (self.count(batch), int(mask.sum()))
        own = batch.get("n_labels", answers)
        # The parts of a step's microbatches add up; a step weights the loss of each by its own number of answers.
        share = answers / max(own, 1)
        sampled = batch[SAMPLED]
        importance = None
        if isinstance(section.rollout, ServerRollout):
            importance = importance_weights(old, sampled, mask, section.rollout.correction, section.rollout.most)
        advantage, reference = batch[ADVANTAGE], batch.get(REFERENCE)
        losses = token_losses(to, log_p, old, mask, advantage, reference, importance)
        # Rows that are not valid have no labels; bnpo counts rows.
        loss = reduced(to, losses[valid], mask[valid], max(answers, 1), tokens) * share + 0 * log_p.sum()

        def of_tokens(values: Tensor) -> Tensor:
            """Mean over the trained tokens of the step."""
            return (values.detach() * mask).sum() * (share / max(tokens, 1))

        terms = {
            "policy/entropy": of_tokens(-log_p),
            "policy/clipped": of_tokens(is_clipped(to, log_p, old, mask, advantage).to(log_p.dtype)),
            "tokens/trained": loss.new_tensor(tokens),
        }
        if section.temperature == 1:
            known = sampled.isfinite()
            terms["policy/mismatch"] = of_tokens(torch.where(known, sampled - old, 0.0).abs())
        if importance is not None:
            terms["policy/importance"] = of_tokens(importance.expand_as(log_p))
        if section.kl is not None:
            terms["policy/kl"] = of_tokens(divergence(log_p, cast("Tensor", reference), section.kl.estimator))
        terms = {name: value.detach() for name, value in terms.items()}
        return LossOutput(loss, terms, torch.tensor(own, device=loss.device))

    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """`cross_entropy` of the answers that the data has, and `STREAM/cross_entropy`."""
        of: dict[str, Any] = {"": None} | {f"{name}/": ids for name, ids in streams.items()}
        return {f"{before}cross_entropy": NatsPerToken(ids) for before, ids in of.items()}

    def update(self, metric: Metric, batch: Batch, output: LossOutput) -> None:
        NextToken().update(metric, batch, output)
