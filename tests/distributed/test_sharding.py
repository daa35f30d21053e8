"""Settings of sharding that a run chooses or is given: the same training, but for how sums are rounded."""

import functools
from unittest.mock import patch

import pytest
import torch

from llmtrain.schema.config import Config
from tests.support import sharded
from tests.support.runs import train
from tests.support.tiny import tiny_config

SHORT = {"train.duration": "6 steps", "train.precision": "amp_bf16", "train.microbatch_size": 2}


def test_a_named_sharding_changes_nothing(ranks, shards, tmp_path):
    losses = []
    for i, sharding in enumerate(({}, {"strategy": "grad_op", "sync_every_microbatch": False})):
        config = tiny_config(shards, tmp_path / f"{i}", {**SHORT, "train.sharding": sharding})
        losses.append(list(ranks(2).run(train, config)[0].losses.values()))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_gradients_summed_in_bf16_are_rounded(ranks, shards, tmp_path):
    """The first loss is before any gradient; those after it differ a little."""
    losses = []
    for dtype in ("fp32", "bf16"):
        config = tiny_config(shards, tmp_path / dtype, {**SHORT, "train.sharding": {"reduce_dtype": dtype}})
        losses.append(list(ranks(2).run(train, config)[0].losses.values()))
    assert losses[1][0] == losses[0][0]
    assert losses[1][1:] != losses[0][1:]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


def loss_and_saved_bytes(config: Config) -> tuple[float, int]:
    """A job: a loss, and the bytes that autograd keeps for its backward pass, with the compiler's partitioner but not its code."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    compile_ = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    tokens = torch.arange(64).reshape(2, 32)
    torch._dynamo.reset()
    with patch("torch.compile", lambda function, mode, **options: compile_(function, **options)):
        model, _ = sharded.build_causal_lm(config)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.loss(tokens, tokens).loss
        loss.backward()
    return loss.item(), sum(sizes.values())


@pytest.mark.slow
def test_a_smaller_budget_keeps_less_and_changes_nothing(ranks, shards, tmp_path):
    block = {"type": "attention", "n_heads": 2, "mlp": {"type": "swiglu", "d_ff": 96}}
    found = []
    for checkpointing in ({}, {"type": "budget", "fraction": 0.5}, {"type": "budget", "fraction": 0.0}):
        changes = {"train.compile": "on", "train.activation_checkpointing": checkpointing}
        changes |= {"model.blocks": {"a": block}, "model.layers": "a*2"}
        found += ranks(1).run(loss_and_saved_bytes, tiny_config(shards, tmp_path, changes))
    losses, sizes = zip(*found, strict=True)
    assert losses[0] == losses[1] == losses[2]
    assert sizes[0] > 1.2 * sizes[1] > 1.5 * sizes[2]
