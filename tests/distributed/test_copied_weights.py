"""Weights that are copied for rollouts give what the trained model gives, gathered; they are those of the last step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmtrain.adapt.base import adaptations
from llmtrain.distributed.world import world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.config import Config
from llmtrain.train.build import build
from llmtrain.train.rollouts.copied_weights import CopiedWeights
from llmtrain.train.rollouts.rollouts import gathered
from tests.support.tiny import BLOCKS, tiny_config

EXPERTS = {
    "type": "experts",
    "d_ff": 16,
    "n_experts": 4,
    "top_k": 2,
    "router": {"choice_bias": True, "bias_rate": 1e-3},
}
ATTENTION = {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}, "mlp": EXPERTS}
CASES: dict[str, dict[str, Any]] = {
    "a hybrid": {},
    "tied embeddings, recomputed, in fp32": {
        "model.tie_embeddings": True,
        "train.precision": "fp32",
        "train.activation_checkpointing": {"type": "full", "mlp_tokens": 3},
    },
    "experts with a balancing bias": {"model.blocks": BLOCKS | {"e": ATTENTION}, "model.layers": "m e (s+m)"},
    "adapters": {"adapt": {"lora": {"rank": 4}}},
    "adapters on 4 bits": {"adapt": {"lora": {"rank": 4}, "base": "nf4"}, "init_from": "a-checkpoint"},
}


def logits_of(model: CausalLM) -> Tensor:
    """After each of some tokens, the first of which are read together."""
    with torch.no_grad():
        cache = model.empty_cache(2, 12)
        ids = torch.arange(24).reshape(2, 12) * 7 % 200
        return torch.stack([model.next_logits(part, cache) for part in (ids[:, :8], *ids[:, 8:].split(1, 1))])


def logits(config: Config) -> list[tuple[Tensor, Tensor]]:
    """A job. (by copies, by the gathered weights): at first; after a change of the trained weights, but before it is copied; after
    that."""
    training = build(config, world_from_environment(), torch.device("cpu"))
    model = training.model
    model.hybrid.init_weights(5)
    for converter in adaptations(config.adapt):
        converter.begin(model.hybrid)
        converter.finish(model.hybrid, model.device)
    logits_of(model.eval())  # leaves some weights gathered, as validation does
    copied = CopiedWeights(training.config, model)
    addresses = [tensor.data_ptr() for tensor in (*copied.model.parameters(), *copied.model.buffers())]
    shared = {p.data_ptr() for p in model.parameters() if not isinstance(p, DTensor)}
    assert {one.data_ptr() for one in copied.model.parameters()} >= shared

    def both() -> tuple[Tensor, Tensor]:
        with gathered(model, training.config.train.sharding):
            return logits_of(copied.model), logits_of(model)

    copied.refresh()
    found = [both()]
    with torch.no_grad():
        for at, tensor in enumerate([*(p for p in model.parameters() if p.requires_grad), *model.buffers()]):
            if tensor.is_floating_point():
                tensor.mul_(1.25).add_(0.02 * (-1) ** at)
    found.append(both())
    copied.refresh()
    found.append(both())
    assert addresses == [tensor.data_ptr() for tensor in (*copied.model.parameters(), *copied.model.buffers())]
    dist.barrier()
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_copies_give_what_the_trained_weights_give(name: str, count: int, shards: Path, tmp_path: Path, ranks):
    config = tiny_config(shards, tmp_path, {"train.precision": "amp_bf16"} | CASES[name])
    for first, stale, fresh in ranks(count).run(logits, config):
        assert torch.equal(*first)
        assert not torch.allclose(*stale, atol=1e-3)
        assert torch.equal(*fresh) and torch.equal(stale[1], fresh[1])
