"""Preferences between answers: losses of pairs, or of answers that are desirable or not, and their validation.

A sample holds the documents chosen, rejected, chosen, rejected, ...; for kto answer, mismatched answer, ...: another's to the same
prompt, by which the divergence from the reference is estimated. Labels are those of the answers' tokens; documents without a label
fill the sample. Means are over the pairs (for kto the answers) of the whole step, whatever microbatches and ranks it is divided
into; of a cross entropy over the tokens of the whole step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from llmtrain.models.loss import IGNORE, LossOutput
from llmtrain.objectives.base import Batch, Objective, Outputs
from llmtrain.objectives.preference_losses import LOSSES, Answers, kto
from llmtrain.objectives.sections import PreferenceSection

REFERENCE = "reference_log_p"
"""Column of a batch: fp32 [batch, documents], the reference model's log-probability of each answer, by its document."""
UNDESIRABLE = "undesirable"
"""Column of a batch for kto: bool [batch, T], true at the tokens of undesirable answers."""


class Likelihoods(NamedTuple):
    """Sums over the tokens of each answer of a batch, in order. All but nll are [pairs, 2]. row, document: the sample and document
    of each answer; first: place of its first labelled token in its row. nll: cross entropy of chosen documents, prompts too, summed
    over their tokens, for orpo; 0 else."""

    log_p: Tensor
    tokens: Tensor
    row: Tensor
    document: Tensor
    first: Tensor
    nll: Tensor


@dataclass(frozen=True)
class Preference(Objective):
    section: PreferenceSection

    @property
    def columns(self) -> tuple[str, ...]:
        reference = (REFERENCE,) if self.section.needs_reference else ()
        return "labels", *reference, *((UNDESIRABLE,) if self.unpaired else ())

    @property
    def unpaired(self) -> bool:
        return "kto" in self.section.loss

    @property
    def has_step_sums(self) -> bool:
        return self.unpaired

    def count(self, batch: Batch) -> int:
        """Pairs, or for kto answers."""
        answers = _answers(batch)
        return len(answers) // 2

    def further_counts(self, batch: Batch) -> tuple[int, ...]:
        """Tokens over which the cross entropies of sft and orpo are means, or for kto desirable and undesirable answers; then all
        trained tokens."""
        labelled = batch["labels"] != IGNORE
        if self.unpaired:
            answers = _answers(batch)[::2]
            undesirable = sum(bool(batch[UNDESIRABLE][row, at]) for row, _, at in answers)
            trained = int((labelled & _chosen(batch["document_ids"])).sum())
            return len(answers) - undesirable, undesirable, trained
        chosen = _chosen(batch["document_ids"])
        of_orpo = int(_in_chosen(batch).sum()) if "orpo" in self.section.loss else 0
        return int((labelled & chosen).sum()), of_orpo, int(labelled.sum())

    def example(self, tokens: Tensor) -> dict[str, Tensor]:
        """Samples of one pair each, of equal lengths without prompts."""
        batch, length = tokens.shape
        places = torch.arange(length, device=tokens.device)
        documents = (places >= length // 2).to(torch.int32).expand(batch, -1)
        made = {"labels": tokens.masked_fill((places + 1) % (length // 2) == 0, IGNORE), "document_ids": documents}
        made[REFERENCE] = torch.zeros(batch, 2, device=tokens.device)
        made[UNDESIRABLE] = torch.zeros_like(tokens, dtype=torch.bool)
        return {name: made[name] for name in ("document_ids", *self.columns)}

    def likelihoods(self, outputs: Outputs, batch: Batch) -> Likelihoods:
        """Sums over the tokens of each answer."""
        labels, documents = batch["labels"], batch["document_ids"]
        labelled = labels != IGNORE
        if self.unpaired and torch.is_grad_enabled():
            labelled = labelled & _chosen(documents)  # the others have no gradient
        wanted, prompts = labelled, None
        if "orpo" in self.section.loss:
            prompts = _in_chosen(batch)
            wanted = labelled | prompts
            labels = torch.where(prompts, batch["input_ids"].roll(-1, 1), labels)
        row, at = wanted.nonzero(as_tuple=True)
        log_p = outputs.model.label_likelihoods(outputs.hidden[row, at], outputs.head, labels[row, at])
        nll = log_p.new_zeros(())
        if prompts is not None:
            nll = -log_p[prompts[row, at]].sum()
            kept = labelled[row, at]
            row, at, log_p = row[kept], at[kept], log_p[kept]
        document = documents[row, at].long()
        key = row * (documents.shape[1] + 1) + document
        _, answer, tokens = torch.unique_consecutive(key, return_inverse=True, return_counts=True)
        first = tokens.cumsum(0) - tokens
        sums = torch.zeros(len(tokens), dtype=log_p.dtype, device=log_p.device).index_add(0, answer, log_p)
        shape = (-1, 1) if self.unpaired and torch.is_grad_enabled() else (-1, 2)
        of = tuple(one.view(shape) for one in (sums, tokens, row[first], document[first], at[first]))
        return Likelihoods(of[0], of[1], of[2], of[3], of[4], nll)

    def step_sums(self, outputs: Outputs, batch: Batch) -> Tensor:
        """kto: the sum of s over mismatched answers, and their number."""
        with torch.no_grad():
            found = self.likelihoods(outputs, batch)
            s = found.log_p - _reference(found, batch)
            return torch.stack((s[:, 1].sum(), s.new_full((), len(s))))

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        section, found = self.section, self.likelihoods(outputs, batch)
        pairs = len(found.log_p)
        units, *totals, trained = (
            batch["step_counts"] if "step_counts" in batch else (pairs, *self.further_counts(batch))
        )
        # A mean over the step's pairs is a sum over this batch's, divided by their number; means over others are brought to it.
        shares = [units / max(total, 1) / max(pairs, 1) for total in totals]
        reference = _reference(found, batch) if section.needs_reference else torch.zeros_like(found.log_p)
        answers = Answers(found.log_p, reference, found.tokens)
        if self.unpaired:
            loss, terms = self._unpaired(outputs, batch, found, answers, shares)
        else:
            loss, terms = self._paired(answers, found, shares)
        terms["tokens/trained"] = loss.new_tensor(trained)
        return LossOutput(loss, {n: t.detach() for n, t in terms.items()}, torch.tensor(pairs, device=loss.device))

    def _paired(self, answers: Answers, found: Likelihoods, shares: list[float]) -> tuple[Tensor, dict[str, Tensor]]:
        section, terms = self.section, {}
        for name, weight in section.loss.items():
            part = answers.log_p.new_zeros(())
            if name in LOSSES:
                part = part + _mean(LOSSES[name](answers, section))
            if name == "sft":
                part = part - answers.log_p[:, 0].sum() * shares[0]
            if name == "orpo":
                part = part + found.nll * shares[1]
            terms[name] = weight * part
        loss = torch.stack(list(terms.values())).sum()
        with torch.no_grad():
            of = answers.ratio if section.needs_reference else answers.mean_log_p
            chosen, rejected = (section.beta * of).unbind(1)
            terms |= {
                "rewards/chosen": _mean(chosen),
                "rewards/rejected": _mean(rejected),
                "rewards/margins": _mean(chosen - rejected),
                "rewards/accuracies": _mean((chosen > rejected).to(chosen.dtype)),
                "logps/chosen": _mean(answers.log_p[:, 0]),
                "logps/rejected": _mean(answers.log_p[:, 1]),
            }
        return loss, terms

    def _unpaired(
        self, outputs: Outputs, batch: Batch, found: Likelihoods, answers: Answers, shares: list[float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total, number = batch["step_sums"] if "step_sums" in batch else self.step_sums(outputs, batch)
        kl = (total / number.clamp(min=1)).clamp(min=0)
        desirable = ~batch[UNDESIRABLE][found.row[:, 0], found.first[:, 0]]
        loss = _mean(kto(answers, desirable, kl, self.section))
        terms = {"kto": loss, "kl": kl}
        for name, of, share in zip(("chosen", "rejected"), (desirable, ~desirable), shares, strict=True):
            terms[f"rewards/{name}"] = self.section.beta * answers.ratio[of, 0].sum() * share
            terms[f"logps/{name}"] = answers.log_p[of, 0].sum() * share
        terms["rewards/margins"] = terms["rewards/chosen"] - terms["rewards/rejected"]
        return loss, terms

    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """`preference_loss` and, of pairs, `accuracy`, and both for each stream, as `STREAM/accuracy`. Means that are not
        over pairs (cross entropies of sft and orpo, divergence of kto) are those of each batch of validation by itself."""
        names = ["preference_loss"] if self.unpaired else ["preference_loss", "accuracy"]
        of = {"": None} | {f"{name}/": ids for name, ids in streams.items()}
        return {f"{before}{name}": MeanOfAnswers(name, ids) for before, ids in of.items() for name in names}

    def update(self, metric: Metric, batch: Batch, output: LossOutput) -> None:
        assert isinstance(metric, MeanOfAnswers)
        value = output.loss if metric.name == "preference_loss" else output.terms["rewards/accuracies"]
        metric.update(value.detach().double() * output.n_tokens, output.n_tokens, batch["sample_ids"])


class MeanOfAnswers(Metric):
    """Mean over pairs or answers of all batches and ranks. samples: as NatsPerToken's."""

    full_state_update = False
    total: Tensor
    number: Tensor

    def __init__(self, name: str, samples: range | None = None):
        super().__init__()
        self.name, self.samples = name, samples
        for state in ("total", "number"):
            self.add_state(state, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, number: Tensor, sample_ids: Tensor) -> None:
        if self.samples is not None:
            counts = ((sample_ids >= self.samples.start) & (sample_ids < self.samples.stop)).any()
            total, number = total * counts, number * counts
        self.total += total
        self.number += number

    def compute(self) -> Tensor:
        return self.total / self.number


def _answers(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, document, place of its first label) of each answer of a batch in host memory, in order."""
    row, at = (batch["labels"] != IGNORE).nonzero(as_tuple=True)
    document = batch["document_ids"][row, at].long()
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (document[1:] != document[:-1])
    return list(zip(row[begins].tolist(), document[begins].tolist(), at[begins].tolist(), strict=True))


def _chosen(documents: Tensor) -> Tensor:
    """True in the first document of each pair."""
    return documents % 2 == 0


def _in_chosen(batch: Batch) -> Tensor:
    """True at the tokens of chosen documents that another token of it follows: bool [batch, T]."""
    documents, labelled = batch["document_ids"].long(), batch["labels"] != IGNORE
    has_label = torch.zeros_like(documents).scatter_add_(1, documents, labelled.long()) > 0
    inside = has_label.gather(1, documents) & _chosen(documents)
    inside[:, :-1] &= documents[:, 1:] == documents[:, :-1]
    inside[:, -1] = False
    return inside


def _reference(found: Likelihoods, batch: Batch) -> Tensor:
    return batch[REFERENCE][found.row, found.document].to(found.log_p.dtype)


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)
