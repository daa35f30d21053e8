"""Sequences that the ranks of a context-parallel group share: which tokens are whose, and what travels between the ranks.

A sequence is cut into 2 * size segments of equal length, and rank r holds segments r and 2 * size - 1 - r: in causal attention
an early segment is little work and a late one much, so that all ranks have the same. Every layer sees this order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.distributed_c10d import GroupName

_NO_GROUP = GroupName("")
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class ContextParallelRanks:
    """This rank's two segments of every sequence, one after the other: `local` tokens are [batch, seq_len / size, ...].

    rank, size: of the context-parallel group. group: its name among torch.distributed's process groups. Methods that gather
    are called by every rank of the group, in the same order; gradients take the same way back and are summed.
    """

    rank: int
    size: int
    group: GroupName = _NO_GROUP

    @property
    def count(self) -> int:
        """Segments of a sequence."""
        return 2 * self.size

    @property
    def own(self) -> tuple[int, int]:
        """This rank's segments, by their place in the sequence."""
        return self.rank, self.count - 1 - self.rank

    @property
    def slots(self) -> list[int]:
        """Every rank's segments in turn, by their place in the sequence: the order of what `all_gather` returns."""
        return [place for rank in range(self.size) for place in (rank, self.count - 1 - rank)]

    @property
    def own_slots(self) -> slice:
        """This rank's two among `slots`."""
        return slice(2 * self.rank, 2 * self.rank + 2)

    def take(self, whole: Tensor) -> Tensor:
        """Local tokens of [batch, seq_len, ...], where the segments divide seq_len."""
        return whole.unflatten(1, (self.count, -1))[:, list(self.own)].flatten(1, 2)

    def positions(self, seq_len: int, device: torch.device) -> Tensor:
        """Places of the local tokens in the sequence, [seq_len / size]."""
        return self.take(torch.arange(seq_len, device=device)[None])[0]

    def fold(self, local: Tensor) -> Tensor:
        """The two segments as rows of a batch: [batch, 2 * n, ...] -> [batch * 2, n, ...]."""
        return local.unflatten(1, (2, -1)).flatten(0, 1)

    def halves(self, local: Tensor) -> tuple[Tensor, ...]:
        """The two segments, [batch, n, ...] each."""
        return local.unflatten(1, (2, -1)).unbind(1)

    def unfold(self, folded: Tensor) -> Tensor:
        """The inverse of `fold`."""
        return folded.unflatten(0, (-1, 2)).flatten(1, 2)

    def gather(self, own: Tensor) -> Tensor:
        """Something of every segment, in the order of the sequence: [batch, 2, ...] -> [batch, count, ...]."""
        everyone = all_gather_tensor_autograd(own.contiguous(), 0, self.group).unflatten(0, (self.size, -1))
        first, second = everyone.unbind(2)
        return torch.cat((first.transpose(0, 1), second.flip(0).transpose(0, 1)), dim=1)

    def gather_slots(self, own: Tensor) -> Tensor:
        """Something of every segment, in the order of `slots`, which copies less than `gather`."""
        everyone = all_gather_tensor_autograd(own.contiguous(), 0, self.group).unflatten(0, (self.size, -1))
        return everyone.transpose(0, 1).flatten(1, 2)

    def gathering(self, own: Tensor) -> Callable[[], Tensor]:
        """Begin to gather something of every segment, outside autograd: rows [batch * 2, ...] -> by a call of the result, which
        waits for it, [batch, count, ...] in the order of `slots`.
        """
        begun = _functional.all_gather_into_tensor(own.contiguous(), self.size, self.group)

        def wait() -> Tensor:
            everyone = _functional.wait_tensor(begun).unflatten(0, (self.size, -1, 2))
            return everyone.transpose(0, 1).flatten(1, 2)

        return wait

    def summing(self, of_slots: Tensor) -> Callable[[], Tensor]:
        """Begin to sum what every rank has for every segment, [batch, count, ...] in the order of `slots`, outside autograd -> by a
        call of the result, that of the own segments, [batch * 2, ...].
        """
        by_rank = of_slots.unflatten(1, (self.size, 2)).transpose(0, 1).flatten(0, 2).contiguous()
        begun = _functional.reduce_scatter_tensor(by_rank, "sum", self.size, self.group)
        return lambda: _functional.wait_tensor(begun)

    def from_before(self, of_slots: Tensor) -> Tensor:
        """Entries of the segments before the own ones: [batch, count, ...], in the order of `slots`, -> [batch * 2, ...]. Zeros
        before the first.
        """
        return self._of_places(of_slots, -1)

    def from_behind(self, of_slots: Tensor) -> Tensor:
        """Entries of the segments behind the own ones; zeros behind the last."""
        return self._of_places(of_slots, 1)

    def _of_places(self, of_slots: Tensor, offset: int) -> Tensor:
        wanted = [place + offset for place in self.own]
        found = [of_slots[:, self.slots.index(at)] if 0 <= at < self.count else None for at in wanted]
        zeros = torch.zeros_like(of_slots[:, 0])
        return torch.stack([zeros if one is None else one for one in found], dim=1).flatten(0, 1)

    def with_before(self, local: Tensor, reach: int) -> list[Tensor]:
        """Each own segment of n tokens, and up to `reach` tokens of the sequence before it: [batch, up to reach + n, ...].

        Of the other ranks' segments no more than the last `reach` tokens travel.
        """
        segments = local.unflatten(1, (2, -1))
        length = segments.shape[2]
        ends = min(reach, length)
        if not ends:
            return list(segments.unbind(1))
        gathered = self.gather(segments[:, :, length - ends :]).flatten(1, 2)
        found = []
        for at, segment in zip(self.own, segments.unbind(1), strict=True):
            begin = max(at * ends - reach, 0)
            if ends == length:  # all tokens are here, the segment's among them
                found.append(gathered[:, begin : (at + 1) * length])
            else:
                found.append(torch.cat((gathered[:, begin : at * ends], segment), dim=1))
        return found
