"""FSDP2 after a pass that ran out of memory: as if it had not been."""

from typing import Any

import pytest
import torch

from llmtrain.schema.config import Config
from llmtrain.train.ranks.fsdp_reset import reset_fsdp
from tests.support import sharded
from tests.support.tiny import tiny_config


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def gradients(config: Config, where: str | None, sync: bool) -> list[torch.Tensor]:
    """A job: this rank's gradients of a pass after one that ended in the third layer's forward or backward pass."""
    model, _ = sharded.build_causal_lm(config)
    model.zero_grad()
    tokens = torch.arange(64).reshape(2, 32)
    if where is not None:
        layer: Any = model.hybrid.blocks[1]
        hook = layer.register_forward_hook(
            fail if where == "forward" else lambda module, args, output: output.register_hook(fail) and None
        )
        model.set_requires_gradient_sync(sync)  # type: ignore[operator]
        model.set_reshard_after_backward(sync)  # type: ignore[operator]
        with pytest.raises(torch.OutOfMemoryError):
            model.loss(tokens, tokens).loss.backward()
        hook.remove()
        reset_fsdp(model)
    for repeat in range(2):
        model.set_requires_gradient_sync(sync or repeat == 1)  # type: ignore[operator]
        model.set_reshard_after_backward(sync or repeat == 1)  # type: ignore[operator]
        model.loss(tokens + repeat, tokens).loss.backward()
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


@pytest.mark.parametrize("sync", [True, False], ids=["every microbatch", "once a step"])
@pytest.mark.parametrize("strategy", ["full", "grad_op"])
@pytest.mark.parametrize("size", [1, 2])
def test_the_next_pass_has_its_own_gradients(ranks, shards, tmp_path, size, strategy, sync):
    changes = {"train.sharding.strategy": strategy, "train.precision": "amp_bf16", "model.layers": "m (s+m) m"}
    config = tiny_config(shards, tmp_path, changes)
    expected = ranks(size).run(gradients, config, None, sync)
    for where in ("forward", "backward"):
        found = ranks(size).run(gradients, config, where, sync)
        for mine, reference in zip(found, expected, strict=True):
            assert len(mine) == len(reference) > 10
            torch.testing.assert_close(mine, reference, rtol=0, atol=0)
