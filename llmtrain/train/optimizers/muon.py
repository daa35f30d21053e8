"""Muon (Jordan et al., 2024) for matrices, AdamW for everything else.

The momentum of a matrix is replaced by the nearest matrix with singular values near 1, by Newton-Schulz iterations, and scaled
to the root mean square that AdamW's updates have (Liu et al., arXiv:2502.16982), so that both share learning rate and decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from llmtrain.models.parameter_roles import Matrices
from llmtrain.schema.optimizers import MuonConfig
from llmtrain.train.optimizers.adamw import AdamWBesideMatrices, divided_by_matrices

# Jordan's: x -> a x + b x^3 + c x^5 takes singular values in a few rounds to about 0.7 .. 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-15


def build(config: MuonConfig, groups: list[dict[str, Any]], matrices: Matrices) -> Muon:
    """Groups are divided further: one is wholly of matrices, or has none."""
    return Muon(divided_by_matrices(groups, matrices), matrices, config)


class Muon(AdamWBesideMatrices):
    """Steps its groups of matrices by Muon, the others as AdamW does.

    matrices: rows of the maps of which each is made; each map is orthogonalised by itself. A sharded matrix is gathered by one
    rank, its owner, which returns the result to the others.
    """

    def __init__(self, groups: list[dict[str, Any]], matrices: Matrices, config: MuonConfig):
        super().__init__(groups, matrices, config)
        self.config = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called when a state is loaded. AdamW's own looks for its `step` in every state; a matrix has none."""
        torch.optim.Optimizer.__setstate__(self, state)

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Step in rounds of as many matrices as there are ranks, the costliest first: the ranks of a round then have work alike."""
        stepped = [(p, group) for group in groups for p in group["params"] if p.grad is not None]
        stepped.sort(key=lambda one: -one[0].numel() * min(one[0].shape))
        ranks = _sharding_group([parameter for parameter, _ in stepped])
        at_once = ranks.size() if ranks else 1
        for start in range(0, len(stepped), at_once):
            turn = stepped[start : start + at_once]
            parameters = [parameter for parameter, _ in turn]
            shards = [self._direction(parameter) for parameter in parameters]
            updates = by_owners(parameters, shards, self._update, ranks)
            for (parameter, group), update in zip(turn, updates, strict=True):
                weight = _local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight.dtype), alpha=-group["lr"])

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        """This rank's shard of the momentum, taken up with the gradient: in bf16 on a GPU, as the iterations are."""
        assert parameter.grad is not None
        state, momentum = self.state[parameter], self.config.momentum
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = _local(parameter.grad), _local(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(buffer, momentum) if self.config.nesterov else buffer
        return direction.to(
            torch.bfloat16 if direction.is_cuda else torch.promote_types(direction.dtype, torch.float32)
        )

    def _update(self, parameter: nn.Parameter, direction: Tensor) -> Tensor:
        """Every part orthogonalised by itself. An orthogonal [m, n] has the root mean square 1 / sqrt(max(m, n))."""
        parts = direction.split(list(self.matrices[parameter]))
        scales = [self.config.rms * math.sqrt(max(part.shape)) for part in parts]
        return torch.cat(
            [newton_schulz(part, self.config.iterations) * scale for part, scale in zip(parts, scales, strict=True)]
        )


def by_owners(
    parameters: Sequence[nn.Parameter],
    shards: Sequence[Tensor],
    compute: Callable[[nn.Parameter, Tensor], Tensor],
    ranks: dist.ProcessGroup | None,
) -> list[Tensor]:
    """compute(parameter, matrix), each by one rank, as shards again. ranks: those that hold the matrices between them, at least
    as many as there are matrices: the i-th rank owns the i-th. None: this process holds all.

    shards: this rank's rows of a matrix of each parameter's shape.
    """
    if ranks is None:
        return [compute(parameter, shard) for parameter, shard in zip(parameters, shards, strict=True)]
    rank, size = ranks.rank(), ranks.size()
    held = [_elements(parameter, size) for parameter in parameters]
    mine = [elements[rank] for elements in held] + [0] * (size - len(held))
    owned = held[rank] if rank < len(held) else [0] * size
    sent = torch.cat([shard.reshape(-1) for shard in shards])
    whole = sent.new_empty(sum(owned))
    dist.all_to_all_single(whole, sent, owned, mine, group=ranks)
    if rank < len(parameters):
        whole = compute(parameters[rank], whole.view(parameters[rank].shape)).reshape(-1).contiguous()
    dist.all_to_all_single(sent, whole, mine, owned, group=ranks)
    return [part.view(shard.shape) for part, shard in zip(sent.split(mine[: len(shards)]), shards, strict=True)]


def _elements(parameter: nn.Parameter, ranks: int) -> list[int]:
    """Elements that each rank holds. FSDP2 gives all the same number of rows, except the last ones."""
    rows, columns = parameter.shape
    each = -(-rows // ranks)
    return [columns * max(min(each, rows - rank * each), 0) for rank in range(ranks)]


def newton_schulz(matrix: Tensor, iterations: int) -> Tensor:
    """[m, n] -> about U V^T of its singular value decomposition U S V^T, with singular values of about 0.7 to 1.2."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def _sharding_group(parameters: Sequence[nn.Parameter]) -> dist.ProcessGroup | None:
    """The ranks that hold one copy of the matrices between them; None for one rank. Replicas compute the same."""
    sharded = [cast("DTensor", p) for p in parameters if isinstance(p, DTensor)]
    if not sharded:
        return None
    mesh, placements = sharded[0].device_mesh, sharded[0].placements
    assert len(sharded) == len(parameters) and placements[-1] == Shard(0), placements
    assert all((p.device_mesh, p.placements) == (mesh, placements) for p in sharded)
    group = mesh.get_group(mesh.ndim - 1)
    return group if group.size() > 1 else None


def _local(tensor: Tensor) -> Tensor:
    return cast("Tensor", tensor.to_local()) if isinstance(tensor, DTensor) else tensor
