"""Supervised fine-tuning beside TRL 1.16's trainer: the same prompts, completions, model and optimizer, microbatches of unequal
tokens; here also packed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from llmtrain.models.causal_lm import CausalLM
from llmtrain.objectives.base import compute_loss
from llmtrain.objectives.completion import Completion
from llmtrain.train.batches import microbatches
from tests.support import hf
from tests.support.preferences import rows
from tests.support.trl import EOS, STEPS, TOLERANCE, in_order, of_peer, peer_of, settings, text, tokenizer

pytestmark = pytest.mark.ci
BATCH = 4
Records = list[dict[str, list[int]]]


def records() -> Records:
    rng = random.Random(hf.SEED)

    def draw(most: int) -> list[int]:
        return [rng.randint(3, hf.VOCAB - 1) for _ in range(rng.randint(1, most))]

    return [{"prompt": draw(9), "completion": draw(14)} for _ in range(STEPS * BATCH)]


def theirs(peer: Any, data: Records, folder: Any) -> list[float]:
    """Losses of all steps, of two microbatches each."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**settings(folder, BATCH // 2), gradient_accumulation_steps=2)
    made = Dataset.from_list([{name: text(ids) for name, ids in one.items()} for one in data])
    trainer = in_order(SFTTrainer)(model=peer, args=args, train_dataset=made, processing_class=tokenizer())
    trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one]


def ours(model: CausalLM, data: Records, per_row: int) -> list[float]:
    """Losses of all steps, so many conversations in a sample, one sample in a microbatch."""
    objective, losses = Completion(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(STEPS):
        some = data[step * BATCH : (step + 1) * BATCH]
        documents = [(torch.tensor([*one["prompt"], *one["completion"], EOS]), len(one["prompt"])) for one in some]
        parts = microbatches(rows(documents, per_row, 24 * per_row), 1, objective)
        total = sum(part["n_labels"] for part in parts)
        optimizer.zero_grad()
        losses.append(0.0)
        for part in parts:
            output = compute_loss(model, objective, part)
            (output.loss * (part["n_labels"] / total)).backward()
            losses[-1] += output.loss.item() * part["n_labels"] / total
        optimizer.step()
    return losses


@pytest.mark.parametrize("per_row", [1, 2, 4], ids=["padded", "packed by two", "packed by four"])
@pytest.mark.parametrize("family", ["llama", "zamba2", "nemotron_h"])
def test_losses_of_twenty_steps_are_those_of_trl(family: str, per_row: int, tmp_path: Any):
    data, peer = records(), peer_of(family)
    model = of_peer(peer)
    expected = theirs(peer, data, tmp_path)
    found = ours(model, data, per_row)
    assert len(set(expected)) > 10  # it trains
    assert found == pytest.approx(expected, abs=TOLERANCE, rel=0)
