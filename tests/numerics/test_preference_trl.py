"""Losses of preferences beside TRL 1.16's trainers: the same data, model and optimizer, unequal microbatches."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.base import compute_loss, without_gradient
from llmtrain.objectives.preference import REFERENCE, UNDESIRABLE, Preference
from llmtrain.objectives.sections import PreferenceSection
from llmtrain.train.batches import microbatches
from tests.support import hf
from tests.support.preferences import rows
from tests.support.trl import EOS, STEPS, TOLERANCE, in_order, of_peer, peer_of, settings, text, tokenizer

pytestmark = pytest.mark.ci
BATCH = 4
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "hinge": {},
    "ipo": {},
    "robust": {"label_smoothing": 0.1},
    "apo_zero": {},
    "apo_down": {},
    "sft": {},
    "sigmoid_norm": {},
    "weighted": {},
    "kto": {},
    "simpo": {"beta": 2.0},
    "orpo": {},
}
OURS = {
    "sigmoid_norm": {"loss": {"sigmoid": 1.0}, "normalize_length": True},
    "weighted": {"loss": {"sigmoid": 1.0, "sft": 0.3}},
}
HYBRIDS = [(name, family) for family in ("zamba2", "nemotron_h") for name in ("sigmoid", "kto", "orpo")]
CASES = [(name, "llama") for name in LOSSES] + HYBRIDS


def records(seed: int) -> list[dict[str, Any]]:
    """Token ids of prompts and answers without their ends."""
    rng = random.Random(seed)
    return [
        {
            name: [rng.randint(3, hf.VOCAB - 1) for _ in range(rng.randint(2, 9))]
            for name in ("prompt", "chosen", "rejected")
        }
        for _ in range(STEPS * BATCH)
    ]


def theirs(name: str, family: str, data: list[dict[str, Any]], folder: Any) -> tuple[Any, list[float], Any]:
    """(weights before, losses of all steps, logs)."""
    from datasets import Dataset

    peer = peer_of(family)
    before = of_peer(peer)
    given = settings(folder, BATCH) | {"beta": LOSSES[name].get("beta", 0.1)}
    if name == "kto":
        from trl import KTOConfig as Config
        from trl import KTOTrainer as Trainer

        made = [
            {"prompt": text(one["prompt"]), "completion": text(one["chosen"]), "label": bool(number % 3)}
            for number, one in enumerate(data)
        ]
    else:
        made = [{key: text(ids) for key, ids in one.items()} for one in data]
        if name == "orpo":
            from trl.experimental.orpo import ORPOConfig as Config
            from trl.experimental.orpo import ORPOTrainer as Trainer
        elif name == "simpo":
            from trl.experimental.cpo import CPOConfig as Config
            from trl.experimental.cpo import CPOTrainer as Trainer

            given |= {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5}
        else:
            from trl import DPOConfig as Config
            from trl import DPOTrainer as Trainer

            given["label_smoothing"] = LOSSES[name].get("label_smoothing", 0.0)
            several = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}
            given |= several if name == "weighted" else {"loss_type": [name]}
    # It would load the reference by the model's name.
    more = {} if name in ("orpo", "simpo") else {"ref_model": copy.deepcopy(peer)}
    trainer = in_order(Trainer)(
        model=peer, args=Config(**given), train_dataset=Dataset.from_list(made), processing_class=tokenizer(), **more
    )
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    return before, [one["loss"] for one in logs], logs


def ours(name: str, model: CausalLM, data: list[dict[str, Any]]) -> tuple[list[float], list[dict[str, float]]]:
    given = {"loss": {name: 1.0}} | LOSSES[name] | OURS.get(name, {})
    objective = Preference(PreferenceSection(type="preference", **given))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    batches = []
    for step in range(STEPS):
        some = data[step * BATCH : (step + 1) * BATCH]
        documents = []
        for number, one in enumerate(some):
            other = some[number - 1]["chosen"] if name == "kto" else one["rejected"]
            documents += [
                (torch.tensor([*one["prompt"], *answer, EOS]), len(one["prompt"])) for answer in (one["chosen"], other)
            ]
        batch = rows(documents, 2, 40)
        batch[UNDESIRABLE][[not (step * BATCH + number) % 3 for number in range(BATCH)]] = True
        batch[REFERENCE] = reference(model, objective, batch)
        batches.append(batch)
    losses, terms = [], []
    for batch in batches:
        parts = microbatches(batch, 3, objective)
        counts = [sum(some) for some in zip(*(part["step_counts"] for part in parts), strict=True)]
        more: dict[str, Any] = {"step_counts": counts}
        if objective.has_step_sums:
            more["step_sums"] = sum(without_gradient(model, part, objective.step_sums) for part in parts)
        optimizer.zero_grad()
        losses.append(0.0)
        terms.append({})
        for part in parts:
            output = compute_loss(model, objective, part | more)
            weight = part["n_labels"] / counts[0]
            (output.loss * weight).backward()
            losses[-1] += output.loss.item() * weight
            for term, value in output.terms.items():
                terms[-1][term] = terms[-1].get(term, 0.0) + value.item() * weight
        optimizer.step()
    return losses, terms


def reference(model: CausalLM, objective: Preference, batch: dict[str, Tensor]) -> Tensor:
    found = without_gradient(model, batch, objective.likelihoods)
    values = torch.full((BATCH, 2), torch.nan)
    values[found.row, found.document] = found.log_p
    return values


@pytest.mark.parametrize("name,family", CASES)
def test_losses_of_twenty_steps_are_those_of_trl(name: str, family: str, tmp_path: Any):
    data = records(hf.SEED)
    before, expected, logs = theirs(name, family, data, tmp_path)
    found, terms = ours(name, before, data)
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert len(set(expected)) > 10  # it trains
    assert apart <= TOLERANCE, (apart, found[:3], expected[:3])
    for term in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        if name != "sft" and term in logs[0] and term in terms[0]:  # which has no reference here
            assert max(abs(a[term] - b[term]) for a, b in zip(terms, logs, strict=True)) <= TOLERANCE, term
