"""Groups of shared blocks under FSDP2: what is gathered and reduced when. That losses and gradients are the same:
test_gradient_sync.py and the tests of whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from llmtrain.schema.config import Config
from tests.support import sharded
from tests.support.tiny import tiny_config

LAYERS = "m (s+m) m (s+m) (s+m)"
"""With two copies: the first in layers 1 and 4, the second in layer 3."""


def order(config: Config) -> tuple[list[str], list[str]]:
    """A job: the parts of a model in the order in which their weights are gathered in a forward pass, and reduced in a backward
    pass."""
    model, _ = sharded.build_causal_lm(config)
    model.zero_grad()
    parts: dict[str, Any] = {f"layer {i}": block for i, block in enumerate(model.hybrid.blocks)}
    parts |= {f"copy {i}": shared for i, shared in enumerate(model.hybrid.shared_blocks())} | {"root": model}
    gathered, reduced = [], []
    for name, part in parts.items():
        group = part._get_fsdp_state()._fsdp_param_group
        unshard, post_backward = group.unshard, group.post_backward
        group.unshard = lambda *args, n=name, f=unshard: (gathered.append(n), f(*args))
        group.post_backward = lambda *args, n=name, f=post_backward: (reduced.append(n), f(*args))
    tokens = torch.arange(64).reshape(2, 32)
    loss = model.loss(tokens, tokens).loss
    forward = list(gathered)
    loss.backward()
    assert all(isinstance(p, DTensor) and p.grad is not None for p in model.parameters())
    return forward, reduced


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_shared_block_is_gathered_and_reduced_with_the_first_layer_that_uses_it(
    ranks, shards, tmp_path, checkpointing
):
    changes: dict[str, Any] = {"model.layers": LAYERS, "model.blocks.s.n_shared": 2}
    changes["train.activation_checkpointing.type"] = checkpointing
    config = tiny_config(shards, tmp_path, changes)
    for gathered, reduced in ranks(2).run(order, config):
        assert gathered == ["root", "layer 0", "layer 1", "copy 0", "layer 2", "layer 3", "copy 1", "layer 4"]
        assert reduced == ["layer 4", "copy 1", "layer 3", "layer 2", "copy 0", "layer 1", "layer 0", "root"]
