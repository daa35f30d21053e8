"""Losses of preferences beside their published formulas, and means over a step however it is divided."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.objectives.base import compute_loss, without_gradient
from llmtrain.objectives.preference import REFERENCE, UNDESIRABLE, Preference
from llmtrain.objectives.sections import PreferenceSection
from llmtrain.train.batches import microbatches
from tests.support.preferences import IGNORE, rows


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(p: float) -> float:
    return p - math.log(1 - math.exp(p))


# w, u: chosen and rejected, summed log-probabilities; rw, rl: the reference's; n, m: lengths; b: beta.
FORMULAS: dict[str, Any] = {
    "sigmoid": lambda w, u, rw, rl, n, m, b: -math.log(sigmoid(b * (w - rw - u + rl))),
    "hinge": lambda w, u, rw, rl, n, m, b: max(0.0, 1 - b * (w - rw - u + rl)),
    "ipo": lambda w, u, rw, rl, n, m, b: ((w - rw) / n - (u - rl) / m - 1 / (2 * b)) ** 2,
    "ipo_sum": lambda w, u, rw, rl, n, m, b: (w - rw - u + rl - 1 / (2 * b)) ** 2,
    "apo_zero": lambda w, u, rw, rl, n, m, b: 1 - sigmoid(b * (w - rw)) + sigmoid(b * (u - rl)),
    "apo_down": lambda w, u, rw, rl, n, m, b: sigmoid(b * (w - rw)) + 1 - sigmoid(b * (w - rw - u + rl)),
    "simpo": lambda w, u, rw, rl, n, m, b: -math.log(sigmoid(b * (w / n - u / m) - 0.5)),
    "robust": lambda w, u, rw, rl, n, m, b: (
        (-0.9 * math.log(sigmoid(b * (w - rw - u + rl))) + 0.1 * math.log(sigmoid(-b * (w - rw - u + rl)))) / 0.8
    ),
    "orpo": lambda w, u, rw, rl, n, m, b: -b * math.log(sigmoid(log_odds(w / n) - log_odds(u / m))),
    "sft": lambda w, u, rw, rl, n, m, b: 0.0,
}
PROMPTS, CHOSEN, REJECTED = [4, 6, 3, 5, 2], [3, 5, 2, 7, 1], [5, 2, 4, 6, 8]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    block = {"type": "attention", "n_heads": 2, "mlp": {"type": "swiglu", "d_ff": 32}}
    config = ModelConfig.model_validate(
        {"vocab_size": 61, "d_model": 16, "max_seq_len": 64, "blocks": {"a": block}, "layers": "a*2"}
    )
    hybrid = HybridLM(config, dtype=torch.float64, documents=True)
    hybrid.init_weights(1)
    return CausalLM(hybrid.double())


def pairs(seq_len: int = 48, per_row: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """A batch of the pairs of the lengths above, `per_row` in a sample, with references by random."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for prompt, chosen, rejected in zip(PROMPTS, CHOSEN, REJECTED, strict=True):
        asked = torch.randint(1, 60, (prompt,), generator=generator)
        for length in (chosen, rejected):
            answer = torch.randint(1, 60, (length,), generator=generator)
            documents.append((torch.cat((asked, answer)), prompt))
    batch = rows(documents, 2 * per_row, seq_len)
    batch[REFERENCE] = -5 * torch.rand(len(batch["labels"]), 2 * per_row, generator=generator, dtype=torch.float64)
    return batch


@torch.no_grad()
def alone(model: CausalLM, batch: dict[str, Tensor]) -> list[tuple[float, int, float, float, int]]:
    """(log p, tokens, reference, nll of all tokens, their number) of each answer, each read by itself."""
    found = []
    for row in range(len(batch["input_ids"])):
        for document in batch["document_ids"][row].unique().tolist():
            own = batch["document_ids"][row] == document
            ids, labels = batch["input_ids"][row, own], batch["labels"][row, own]
            if (labels != IGNORE).any():
                log_p = model.logits(ids[None])[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                answer = log_p[labels[:-1] != IGNORE]
                reference = float(batch[REFERENCE][row, document])
                found.append((float(answer.sum()), len(answer), reference, -float(log_p.sum()), len(log_p)))
    return found


@pytest.mark.parametrize("name", FORMULAS)
def test_each_loss_is_its_formula(model: CausalLM, name: str):
    smoothing = 0.1 if name == "robust" else 0.0
    section = PreferenceSection(type="preference", loss={name: 1.0}, beta=0.3, label_smoothing=smoothing)  # type: ignore
    batch = pairs(per_row=2, seq_len=64)
    answers = alone(model, batch)
    chosen, rejected = answers[::2], answers[1::2]
    expected = sum(
        FORMULAS[name](w, u, rw, rl, n, m, 0.3) for (w, n, rw, *_), (u, m, rl, *_) in zip(chosen, rejected, strict=True)
    ) / len(chosen)
    if name == "sft":
        expected -= sum(one[0] for one in chosen) / sum(one[1] for one in chosen)
    if name == "orpo":
        expected += sum(one[3] for one in chosen) / sum(one[4] for one in chosen)
    found = compute_loss(model, Preference(section), batch)
    assert found.loss.item() == pytest.approx(expected, abs=1e-10)
    margin = sum(w - rw - u + rl for (w, _, rw, *_), (u, _, rl, *_) in zip(chosen, rejected, strict=True)) * 0.3 / 5
    if section.needs_reference:
        assert float(found.terms["rewards/margins"]) == pytest.approx(margin, abs=1e-10)


def test_conservative_dpo_and_length_normalisation(model: CausalLM):
    section = PreferenceSection(type="preference", beta=0.3, label_smoothing=0.2, normalize_length=True)
    answers = alone(model, batch := pairs())
    expected = 0.0
    for (w, n, rw, *_), (u, m, rl, *_) in zip(answers[::2], answers[1::2], strict=True):
        x = 0.3 * ((w - rw) / n - (u - rl) / m)
        expected -= (0.8 * math.log(sigmoid(x)) + 0.2 * math.log(sigmoid(-x))) / 5
    assert float(compute_loss(model, Preference(section), batch).loss) == pytest.approx(expected, abs=1e-10)


def kto_batch() -> dict[str, Tensor]:
    batch = pairs()
    batch[UNDESIRABLE][1] = batch[UNDESIRABLE][3] = True
    return batch


def test_kto_is_its_formula(model: CausalLM):
    section = PreferenceSection(type="preference", loss={"kto": 1.0}, beta=0.3, undesirable_weight=1.5)
    answers = alone(model, batch := kto_batch())
    z = max(sum(one[0] - one[2] for one in answers[1::2]) / 5, 0.0)
    expected = 0.0
    for number, (log_p, _, reference, *_) in enumerate(answers[::2]):
        s = log_p - reference
        expected += (1.5 * (1 - sigmoid(0.3 * (z - s))) if number in (1, 3) else 1 - sigmoid(0.3 * (s - z))) / 5
    found = compute_loss(model, Preference(section), batch)
    assert float(found.loss) == pytest.approx(expected, abs=1e-10)
    assert float(found.terms["kl"]) == pytest.approx(z, abs=1e-10)
    rewards = [0.3 * (one[0] - one[2]) for one in answers[::2]]
    assert float(found.terms["rewards/chosen"]) == pytest.approx((rewards[0] + rewards[2] + rewards[4]) / 3, abs=1e-10)
    assert float(found.terms["rewards/rejected"]) == pytest.approx((rewards[1] + rewards[3]) / 2, abs=1e-10)


@pytest.mark.parametrize("losses", [{"sigmoid": 1.0, "sft": 0.5}, {"orpo": 1.0}, {"kto": 1.0}])
def test_microbatches_of_unequal_tokens_make_the_step_of_the_whole(model: CausalLM, losses: dict[str, float]):
    objective = Preference(PreferenceSection(type="preference", loss=losses, beta=0.3))  # type: ignore[arg-type]
    batch = kto_batch()

    def step(size: int) -> tuple[dict[str, float], Tensor]:
        parts = microbatches(batch, size, objective)
        counts = [sum(some) for some in zip(*(part["step_counts"] for part in parts), strict=True)]
        for part in parts:
            part["step_counts"] = counts
        if objective.has_step_sums:
            sums = sum(without_gradient(model, part, objective.step_sums) for part in parts)
            parts = [part | {"step_sums": sums} for part in parts]
        model.zero_grad()
        terms: dict[str, float] = {}
        for part in parts:
            output = compute_loss(model, objective, part)
            weight = part["n_labels"] / counts[0]
            (output.loss * weight).backward()
            for name, value in {"total": output.loss, **output.terms}.items():
                terms[name] = terms.get(name, 0.0) + float(value) * float(weight)
        return terms, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole, gradient = step(5)
    divided, sum_of_parts = step(2)
    assert divided == pytest.approx(whole, abs=1e-10)
    torch.testing.assert_close(sum_of_parts, gradient, rtol=0, atol=1e-12)
    assert gradient.abs().max() > 1e-4
    trained = int((batch["labels"] != IGNORE).sum()) if "kto" not in losses else sum(CHOSEN)
    assert whole["tokens/trained"] == pytest.approx(trained)


def test_validation_is_a_mean_over_pairs(model: CausalLM):
    objective = Preference(PreferenceSection(type="preference"))
    whole = compute_loss(model, objective, pairs())
    metrics = objective.metrics({"web": range(0, 2)})
    assert set(metrics) == {"preference_loss", "accuracy", "web/preference_loss", "web/accuracy"}
    for part in microbatches(pairs(), 2, objective):
        for metric in metrics.values():
            objective.update(metric, part, compute_loss(model, objective, part))
    assert float(metrics["preference_loss"].compute()) == pytest.approx(float(whole.loss), abs=1e-10)
    assert float(metrics["accuracy"].compute()) == pytest.approx(float(whole.terms["rewards/accuracies"]), abs=1e-10)
    web = compute_loss(model, objective, {name: value[:2] for name, value in pairs().items()})
    assert float(metrics["web/preference_loss"].compute()) == pytest.approx(float(web.loss), abs=1e-10)


def test_an_example_for_measurements_is_a_pair_in_each_sample(model: CausalLM):
    tokens = torch.arange(32).view(2, 16)
    for loss in ("sigmoid", "kto"):
        objective = Preference(PreferenceSection(type="preference", loss={loss: 1.0}))
        batch = {"input_ids": tokens} | objective.example(tokens)
        assert objective.count(batch) == 2
        assert compute_loss(model, objective, batch).loss.isfinite()
