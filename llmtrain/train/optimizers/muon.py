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

from llmtrain.models.parameters import Parameters
from llmtrain.schema.optimizers import MuonConfig
from llmtrain.train.optimizers.adamw import AdamWBesideMatrices

# Jordan's: x -> a x + b x^3 + c x^5 takes singular values in a few rounds to about 0.7 .. 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-15
_ELEMENTS_AT_ONCE = 2**24
"""Of equal matrices that a rank orthogonalises together; a larger one is computed alone."""


def build(config: MuonConfig, groups: list[dict[str, Any]], parameters: Parameters) -> Muon:
    return Muon(groups, parameters, config)


class Muon(AdamWBesideMatrices):
    """Steps its groups of matrices by Muon, the others as AdamW does.

    Each of the maps of which a matrix is made is orthogonalised by itself. A sharded matrix is gathered by one
    rank, its owner, which returns the result to the others.
    """

    def __init__(self, groups: list[dict[str, Any]], parameters: Parameters, config: MuonConfig):
        super().__init__(groups, parameters, config)
        self.config = config

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called when a state is loaded. AdamW's own looks for its `step` in every state; a matrix has none."""
        torch.optim.Optimizer.__setstate__(self, state)

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        """Step in rounds of equal matrices, as many as each rank can take at once, the costliest first: the ranks of a round then
        have work alike, and small matrices are computed together."""
        equal: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = (tuple(parameter.shape), tuple(self.matrices[parameter]), number)
                    equal.setdefault(key, []).append(parameter)
        stepped = [parameter for some in equal.values() for parameter in some]
        ranks = _sharding_group([parameter for parameter in stepped if parameter.ndim == 2])
        for (shape, parts, number), some in sorted(
            equal.items(), key=lambda one: -math.prod(one[0][0]) * min(one[0][0][-2:])
        ):
            at_once = max(_ELEMENTS_AT_ONCE // math.prod(shape), 1) * (ranks.size() if ranks else 1)
            for start in range(0, len(some), at_once):
                self._step_round(some[start : start + at_once], parts, groups[number], ranks)

    def _step_round(
        self,
        parameters: list[nn.Parameter],
        parts: tuple[int, ...],
        group: dict[str, Any],
        ranks: dist.ProcessGroup | None,
    ) -> None:
        shards = self._directions(parameters)
        if parameters[0].ndim == 3:  # of experts, of which each rank has some whole
            few = max(_ELEMENTS_AT_ONCE // math.prod(parameters[0].shape[1:]), 1)
            updates = [torch.cat([self._updates(some, parts) for some in shard.split(few)]) for shard in shards]
        else:
            updates = by_owners(parameters[0].shape, shards, lambda directions: self._updates(directions, parts), ranks)
        weights = [_local(parameter) for parameter in parameters]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, [update.to(weights[0].dtype) for update in updates], alpha=-group["lr"])

    def _directions(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """This rank's shards of the momentum, taken up with the gradients: in bf16 on a GPU, as the iterations are."""
        momentum = self.config.momentum
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [_local(cast("Tensor", parameter.grad)) for parameter in parameters]
        buffers = [_local(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        found = torch._foreach_lerp(gradients, buffers, momentum) if self.config.nesterov else buffers
        return [
            one.to(torch.bfloat16 if one.is_cuda else torch.promote_types(one.dtype, torch.float32)) for one in found
        ]

    def _updates(self, directions: Tensor, parts: tuple[int, ...]) -> Tensor:
        """[n, rows, columns] with every part of every matrix orthogonalised by itself, equal ones together. An orthogonal [m, n]
        has the root mean square 1 / sqrt(max(m, n))."""
        pieces = list(directions.split(list(parts), dim=1))
        for rows in set(parts):
            places = [place for place, height in enumerate(parts) if height == rows]
            scale = self.config.rms * math.sqrt(max(rows, directions.shape[2]))
            together = torch.cat([pieces[place] for place in places])
            found = newton_schulz(together, self.config.iterations) * scale
            for place, piece in zip(places, found.chunk(len(places)), strict=True):
                pieces[place] = piece
        return torch.cat(pieces, dim=1)


def by_owners(
    shape: Sequence[int], shards: Sequence[Tensor], compute: Callable[[Tensor], Tensor], ranks: dist.ProcessGroup | None
) -> list[Tensor]:
    """compute of matrices of one shape, [n, rows, columns] -> the same, each matrix by one rank, as shards again.

    shards: this rank's rows of each. ranks: those that hold the matrices between them; the i-th matrix is for rank i modulo their
    number. None: this process holds all.
    """
    if ranks is None:
        return list(compute(torch.stack(list(shards))).unbind())
    rank, size, columns = ranks.rank(), ranks.size(), shape[1]
    rows = _rows(shape[0], size)
    counts = [len(shards[owner::size]) for owner in range(size)]
    mine, owned = [rows[rank] * columns * count for count in counts], [n * columns * counts[rank] for n in rows]
    sent = torch.cat([shard.reshape(-1) for owner in range(size) for shard in shards[owner::size]])
    received = sent.new_empty(sum(owned))
    dist.all_to_all_single(received, sent, owned, mine, group=ranks)
    if counts[rank]:
        pieces = received.split(owned)
        whole = torch.cat([one.view(counts[rank], n, columns) for one, n in zip(pieces, rows, strict=True)], dim=1)
        received = torch.cat([one.reshape(-1) for one in compute(whole).split(rows, dim=1)])
    dist.all_to_all_single(sent, received, mine, owned, group=ranks)
    results = [list(one.view(count, rows[rank], columns)) for one, count in zip(sent.split(mine), counts, strict=True)]
    return [results[place % size][place // size] for place in range(len(shards))]


def _rows(rows: int, ranks: int) -> list[int]:
    """Rows that each rank holds. FSDP2 gives all the same number, except the last ones."""
    each = -(-rows // ranks)
    return [max(min(each, rows - rank * each), 0) for rank in range(ranks)]


def newton_schulz(matrices: Tensor, iterations: int) -> Tensor:
    """[..., m, n] -> about U V^T of their singular value decompositions U S V^T, with singular values of about 0.7 to 1.2."""
    stands = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if stands else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if stands else x).reshape(matrices.shape)


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
