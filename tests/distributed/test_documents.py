"""Runs with data.mask_documents: their steps, their curves, and how they resume."""

from pathlib import Path

import pytest
import torch

from llmtrain.data.loader.batches import IGNORED
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from tests.distributed.test_gradients import ONE_STEP, Step, assert_same_step, one_step
from tests.support.runs import train
from tests.support.tiny import tiny_config

EOD = 0
MASKED = {"data.mask_documents": True, "model.positions": "learned"}
OTHER_LAYERS = {
    "model.blocks.a": {"type": "attention", "n_heads": 2, "mlp": {"type": "swiglu", "d_ff": 48}},
    "model.blocks.g": {
        "type": "gated_deltanet",
        "n_heads": 2,
        "n_key_heads": 1,
        "key_head_dim": 8,
        "value_head_dim": 16,
    },
    "model.layers": "m (s+m)*2 a g",
}
"""Dense attention and Gated DeltaNet beside those of the tiny run."""


def documents_apart(config: Config, batch: dict[str, torch.Tensor]) -> Step:
    """The same weights, one document of the batch at a time, weighted by tokens."""
    model = HybridLM(config.model)
    causal_lm = CausalLM(model, config.train.loss)
    model.init_weights(config.seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, tokens = [], 0
    for row in batch["input_ids"]:
        ends = ((row == EOD).nonzero()[:, 0] + 1).tolist()
        for document in row.tensor_split(ends):
            if len(document) > 1:
                out = causal_lm.loss(document[None, :-1], document[None, 1:])
                losses.append(out.loss * out.n_tokens)
                tokens += int(out.n_tokens)
    assert tokens == int((batch["labels"] != IGNORED).sum()) < batch["labels"][:, :-1].numel()
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(gradients, weights, batch, loss.item())


@pytest.mark.parametrize(
    ("size", "microbatch", "compiled_by", "kind"),
    [
        pytest.param(1, 8, None, "none", marks=pytest.mark.ci),
        (2, 1, None, "full"),
        pytest.param(2, 2, "aot_eager", "selective", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_the_documents_apart(ranks, shards, tmp_path, size, microbatch, compiled_by, kind):
    changes = {
        "train.microbatch_size": microbatch,
        "train.compile": "on" if compiled_by else "off",
        "train.activation_checkpointing": {"type": kind},
    }
    config = tiny_config(shards, tmp_path / "run", ONE_STEP | MASKED | OTHER_LAYERS | changes)
    for step in ranks(size).run(one_step, config, compiled_by):
        assert_same_step(step, documents_apart(config, step.batch))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.mark.ci
def test_a_resumed_run_is_bit_identical_and_sees_what_an_unmasked_one_sees(ranks, shards, folder):
    changes = (
        MASKED
        | OTHER_LAYERS
        | {"train.duration": "8 steps", "checkpoint.interval": "3 steps", "eval.interval": "4 steps"}
    )
    [whole] = ranks(1).run(train, tiny_config(shards, folder / "whole", changes))
    config = tiny_config(shards, folder / "run", changes)
    [first] = ranks(1).run(train, config, 5)
    [second] = ranks(1).run(train, config)
    assert first.samples | second.samples == whole.samples
    assert second.losses == whole.losses
    assert second.validation == whole.validation and sorted(whole.validation) == [4, 8]
    unmasked = tiny_config(shards, folder / "unmasked", changes | {"data.mask_documents": False})
    [other] = ranks(1).run(train, unmasked)
    assert other.samples == whole.samples
    assert other.losses[1] != whole.losses[1] and other.validation != whole.validation
