"""Clipping and AdamW on local shards: the results of PyTorch's operators on DTensors."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from llmtrain.train.optimizers.adamw import ShardedAdamW
from llmtrain.train.ranks.tensor_gradients import clip_shards

SHAPES = [(6, 4), (5, 3), (1,), (7,)]
"""Rows that two ranks cannot share evenly, and one that a rank has nothing of."""


def stepped(ours: bool, max_norm: float) -> tuple[list[torch.Tensor], list[float]]:
    """A job: weights and moments after three steps, and the gradients' norms before clipping. ours: by local tensors."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def draw(seed: int, shape: tuple[int, ...]) -> DTensor:
        return distribute_tensor(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), mesh, [Shard(0)])

    parameters = [torch.nn.Parameter(draw(i, shape)) for i, shape in enumerate(SHAPES)]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = (ShardedAdamW if ours else torch.optim.AdamW)(groups, lr=0.1, fused=True)
    norms = []
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = draw(10 * step + i, SHAPES[i])
        if ours:
            norms.append(float(clip_shards(parameters, max_norm)))
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
            assert isinstance(norm, DTensor)
            norms.append(float(norm.full_tensor()))
        optimizer.step()
    held = [parameter.detach() for parameter in parameters]
    held += [optimizer.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(tensor, DTensor) for tensor in held)
    return [tensor.full_tensor() for tensor in held], norms  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, float("inf")])
def test_a_step_is_that_of_dtensors(ranks, size, max_norm):
    for (found, norms), (expected, their_norms) in zip(
        ranks(size).run(stepped, True, max_norm), ranks(size).run(stepped, False, max_norm), strict=True
    ):
        assert norms == pytest.approx(their_norms, rel=1e-6)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
