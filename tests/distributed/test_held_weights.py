"""Weights that outlive FSDP2's own gathered ones, on one rank: the passes that read them, and FSDP2 afterwards, are as ever."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.schema.config import Config
from llmtrain.train.cuda_graphs import added_to
from llmtrain.train.held_weights import HeldWeights, local_parts
from tests.support import sharded
from tests.support.tiny import tiny_config


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(seed, seed + 64).reshape(2, 32)
    return tokens, tokens.roll(-1, 1)


def by_fsdp2(model: Any, seeds: tuple[int, ...]) -> list[Tensor]:
    """Gradients of these microbatches, as FSDP2 adds them up."""
    model.zero_grad()
    for seed in seeds:
        model.loss(*batch(seed)).loss.backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


def passes(config: Config) -> dict[str, Any]:
    """A job. What the passes before, within and after `read` found."""
    model, _ = sharded.build_causal_lm(config)
    expected = by_fsdp2(model, (1, 2))
    model.zero_grad()
    names = {id(p): name for name, p in model.named_parameters()}
    held = HeldWeights(model)
    with held.read():
        sums = [torch.zeros_like(p) for p in held.parameters]
        within = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        with added_to(local_parts(sums), held.leaves) as reached:
            for seed in (1, 2):
                model.loss(*batch(seed)).loss.backward()
        assert reached == set(range(len(sums)))
        left = [name for name, p in model.named_parameters() if p.grad is not None]
    found = dict(zip((names[id(p)] for p in held.parameters), local_parts(sums), strict=True))
    sharded_again = all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    kept = [leaf.detach().clone() for leaf in held.leaves]
    after = by_fsdp2(model, (1, 2))
    stayed = all(torch.equal(a, b) for a, b in zip(held.leaves, kept, strict=True))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    held.refresh()
    fresh = all(
        torch.equal(leaf, p.to(leaf.dtype)) for leaf, p in zip(held.leaves, local_parts(held.parameters), strict=True)
    )
    return {
        "expected": expected,
        "found": [found[name] for name, _ in model.named_parameters()],
        "after": after,
        "sharded within": within,
        "left": left,
        "states": (sharded_again, stayed, fresh),
        "formats": {leaf.dtype for leaf in held.leaves},
    }


def test_passes_within_and_after_have_the_gradients_of_fsdp2(ranks, shards, tmp_path):
    changes = {"train.precision": "amp_bf16", "model.layers": "m (s+m) m", "model.tie_embeddings": True}
    (found,) = ranks(1).run(passes, tiny_config(shards, tmp_path, changes))
    assert found["states"] == (True, True, True)
    assert not found["sharded within"] and not found["left"]
    assert found["formats"] == {torch.bfloat16, torch.float32}
    assert len(found["expected"]) > 10
    for expected, within, after in zip(found["expected"], found["found"], found["after"], strict=True):
        assert torch.equal(within, expected) and torch.equal(after, expected)


def test_where_nothing_is_sharded_the_leaves_are_the_parameters():
    model = nn.Linear(3, 2)
    held = HeldWeights(model)
    with held.read():
        assert held.leaves == held.parameters == list(model.parameters())
    before = model.weight.detach().clone()
    held.refresh()
    assert torch.equal(model.weight, before)
