"""Weights that outlive FSDP2's own gathered ones: the passes that read them, and FSDP2 afterwards, are as ever."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.schema.config import Config
from llmtrain.train.graphs.cuda_graphs import added_to
from llmtrain.train.graphs.persistent_weights import PersistentUnshardedWeights, local_parts
from tests.support import sharded
from tests.support.tiny import tiny_config


def batch(seed: int) -> tuple[Tensor, Tensor]:
    first = seed + 7 * dist.get_rank()
    tokens = torch.arange(first, first + 64).reshape(2, 32)
    return tokens, tokens.roll(-1, 1)


def validated(model: Any) -> float:
    with torch.no_grad():
        return float(model.loss(*batch(3)).loss)


def by_fsdp2(model: Any, seeds: tuple[int, ...]) -> list[Tensor]:
    """Gradients of these microbatches, as FSDP2 adds them up and reduces them once."""
    model.zero_grad()
    for seed in seeds:
        model.set_requires_gradient_sync(seed == seeds[-1])
        model.loss(*batch(seed)).loss.backward()
    return [p.grad.to_local().clone() for p in model.parameters()]


def passes(config: Config) -> dict[str, Any]:
    """A job. What the passes before, within and after `read` found."""
    model, _ = sharded.build_causal_lm(config)
    expected = by_fsdp2(model, (1, 2))
    model.zero_grad()
    held = PersistentUnshardedWeights(model)
    with held.read():
        sums = held.zeros()
        within = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        with added_to(sums, held.leaves) as reached:
            for seed in (1, 2):
                model.loss(*batch(seed)).loss.backward()
        assert reached == set(range(len(sums)))
        left = [name for name, p in model.named_parameters() if p.grad is not None]
    sharded_again = all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    found = []
    for _ in range(2):  # the second time to gradients that are there
        held.hand_over(sums, sorted(reached))
        found.append([t.clone() for t in local_parts([p.grad for p in model.parameters()])])
    kept = [leaf.detach().clone() for leaf in held.leaves]
    after = by_fsdp2(model, (1, 2))
    stayed = all(torch.equal(a, b) for a, b in zip(held.leaves, kept, strict=True))
    before = validated(model)
    with torch.no_grad():
        for p in held.parameters:  # as the optimizer has them, whatever the modules do
            p.add_(1)
    held.refresh()
    validation = validated(model), before
    fresh = all(
        torch.equal(leaf, p.full_tensor().to(leaf.dtype))  # pyright: ignore[reportAttributeAccessIssue]
        for leaf, p in zip(held.leaves, held.parameters, strict=True)
    )
    return {
        "expected": expected,
        "found": found,
        "after": after,
        "sharded within": within,
        "left": left,
        "states": (sharded_again, stayed, fresh),
        "validation": validation,
        "formats": {leaf.dtype for leaf in held.leaves},
    }


@pytest.mark.parametrize("count", [1, 2, pytest.param(3, marks=pytest.mark.ci)])
def test_passes_within_and_after_have_the_gradients_of_fsdp2(ranks, shards, tmp_path, count):
    changes = {"train.precision": "amp_bf16", "model.layers": "m (s+m) m", "model.tie_embeddings": True}
    for found in ranks(count).run(passes, tiny_config(shards, tmp_path, changes)):
        assert found["states"] == (True, True, True)
        after, before = found["validation"]
        assert after != before  # not by the weights that validation before had gathered
        assert not found["sharded within"] and not found["left"]
        assert found["formats"] == {torch.bfloat16, torch.float32}
        assert len(found["expected"]) > 10
        once, twice = found["found"]
        for expected, first, second, again in zip(found["expected"], once, twice, found["after"], strict=True):
            torch.testing.assert_close(first, expected, rtol=1e-6, atol=1e-9)
            assert torch.equal(second, 2 * first)
            assert torch.equal(again, expected)


def test_where_nothing_is_sharded_the_leaves_are_the_parameters():
    model = nn.Linear(3, 2)
    held = PersistentUnshardedWeights(model)
    with held.read():
        assert held.leaves == held.parameters == list(model.parameters())
    before = model.weight.detach().clone()
    held.refresh()
    assert torch.equal(model.weight, before)
