"""Microbatches under FSDP2: what stays gathered between them, and that gradients are the same."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from llmtrain.distributed.world import gloo_group
from llmtrain.kernels import accumulate
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.config import Config
from llmtrain.train.graphs.persistent_weights import sum_by_our_kernel
from llmtrain.train.step import GradientSync, Step
from tests.support import sharded
from tests.support.tiny import tiny_config

MICROBATCHES = 3


def gathered(model: torch.nn.Module) -> set[str]:
    """Names of the parts of the model whose parameters are whole: `blocks`, `embed`, ..."""
    return {name.split(".")[1] for name, p in model.named_parameters() if not isinstance(p, DTensor)}


def step(config: Config, marked: bool) -> tuple[list[set[str]], list[torch.Tensor]]:
    """A job: parts that are gathered after each microbatch of a step, and the gradients. marked: each is marked by GradientSync."""
    model, _ = sharded.build_causal_lm(config)
    model.zero_grad()
    sync = GradientSync(model, config.train.sharding)
    stays = []
    for i in range(MICROBATCHES):
        if marked:
            sync.mark(i == MICROBATCHES - 1)
        tokens = torch.arange(i, i + 64).reshape(2, 32)
        model.loss(tokens, tokens).loss.backward()
        stays.append(gathered(model))
    return stays, [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("strategy", "every"), [("grad_op", True), ("grad_op", False), ("full", True), ("full", False)], ids=str
)
def test_weights_stay_until_the_last_microbatch_where_they_take_no_more_memory(
    ranks, shards, tmp_path, strategy, every, tied
):
    config = tiny_config(
        shards,
        tmp_path,
        {
            "train.sharding.strategy": strategy,
            "train.sharding.sync_every_microbatch": every,
            "model.layers": "m (s+m) m",
            "model.tie_embeddings": tied,
        },
    )
    outside = {"embed", "norm", "shared"} | (set() if tied else {"head"})
    stays = outside if strategy == "full" and every else outside | {"blocks"}
    for (found, gradients), (_, reference) in zip(
        ranks(2).run(step, config, True), ranks(2).run(step, config, False), strict=True
    ):
        assert found == [stays] * (MICROBATCHES - 1) + [set()]
        for mine, expected in zip(gradients, reference, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def summed(config: Config, ours: bool) -> tuple[int, list[torch.Tensor]]:
    """A job: how many sums our kernel was asked for in a step that reduces gradients once, and the gradients."""
    model: Any = sharded.build_causal_lm(config)[0]
    if ours:
        sum_by_our_kernel(model)
    model.zero_grad()
    with mock.patch.object(accumulate, "accumulate", wraps=accumulate.accumulate) as sums:
        for i in range(MICROBATCHES):
            model.set_requires_gradient_sync(i == MICROBATCHES - 1)
            tokens = torch.arange(i, i + 64).reshape(2, 32)
            model.loss(tokens, tokens).loss.backward()
    return sums.call_count, [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("tensor", [1, 2])
def test_sums_by_our_kernel_are_those_of_fsdp2(ranks, shards, tmp_path, tensor):
    changes = {"train.precision": "amp_bf16", "train.parallel.tensor": tensor, "model.layers": "m (s+m) m"}
    config = tiny_config(shards, tmp_path, changes)
    for (calls, mine), (none, reference) in zip(
        ranks(2).run(summed, config, True), ranks(2).run(summed, config, False), strict=True
    ):
        assert none == 0
        assert calls >= (MICROBATCHES - 1) * 10  # for each matrix, at least
        assert all(map(torch.equal, mine, reference))


def passes(config: Config, alone: bool) -> tuple[bool, list[torch.Tensor], list[torch.Tensor]]:
    """A job: whether all gradients are FSDP2's sums themselves; gradients of one step, and of two. alone: as GradientSync finds."""
    model: Any = sharded.build_causal_lm(config)[0]
    model.zero_grad()
    step = Step(model, NextToken(), 1, GradientSync(model, config.train.sharding), gloo_group())
    step.sync.alone &= alone
    ids = torch.arange(MICROBATCHES * 32).reshape(-1, 32) % config.model.vocab_size
    batch = {"input_ids": ids, "labels": ids, "sample_ids": torch.arange(len(ids)), "text_bytes": torch.zeros(len(ids))}
    found, sums = [], set[int]()
    finish = step.sync.finish

    def noted() -> None:
        for one in (one for group in step.sync.groups for one in group.fsdp_params):
            total = one.unsharded_accumulated_grad
            sums.add((one._unsharded_param.grad if total is None else total).data_ptr())
        finish()

    with mock.patch.object(step.sync, "finish", noted):
        for _ in range(2):
            step.forward_backward(batch, lambda *_: None)
            gradients = [p.grad.to_local() for p in model.parameters()]
            found.append([gradient.clone() for gradient in gradients])
            if len(found) == 1:
                taken = {gradient.data_ptr() for gradient in gradients} == sums
    return taken, *found


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_a_rank_alone_takes_sums_as_its_gradients(ranks, shards, tmp_path, precision):
    """And adds them to gradients that are there."""
    config = tiny_config(shards, tmp_path, {"train.precision": precision, "model.layers": "m (s+m) m"})
    [(taken, once, twice)] = ranks(1).run(passes, config, True)
    [(copied, *wanted)] = ranks(1).run(passes, config, False)
    assert taken
    assert not copied
    for mine, reference in zip((once, twice), wanted, strict=True):
        assert all(map(torch.equal, mine, reference))
    assert not all(map(torch.equal, once, twice))
