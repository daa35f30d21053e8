"""Expert parallelism (train.parallel.expert): ranks that divide the experts of a layer, and the way of tokens to them and back.

A row is one meeting of a token with an expert. Each rank sends every row to the rank that holds its expert, in the order of the
experts, and gets it back when the expert has computed: two all-to-alls of rows in the forward pass, and two in the backward pass.
How many rows travel follows from the router alone, so that the host waits for their numbers once in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from llmtrain.kernels.experts.reference import Rows, combine, take
from llmtrain.kernels.operators import operator
from llmtrain.models.passing import passed_on
from llmtrain.models.slices import Piece, Slices

Function = TypeVar("Function", bound=Callable[..., Any])


def _exchange_counts(counts: Tensor, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(counts, None, None, GroupName(group)))


exchange_counts = operator("exchange_counts", _exchange_counts)
"""(counts [ranks, n], group) -> the row of each rank for this one. An operator of its own, whose result layers that are computed
again keep."""
torch.library.register_fake(exchange_counts)(lambda counts, group: torch.empty_like(counts))


def eager(function: Function) -> Function:
    """The function outside of the compiler's graphs: the host waits for how many rows travel."""
    return cast("Function", torch.compiler.disable(function))


@dataclass(frozen=True)
class ExpertRanks:
    """This rank's place among `size` ranks that divide every layer's experts. group: its name among torch.distributed's process
    groups. Every rank of it calls `begin` and what follows, in the same order.

    share: factor of the gradients of experts, which are of the tokens of all these ranks, where FSDP2 averages over those that hold
    the same experts.
    """

    rank: int
    size: int
    group: GroupName
    share: float

    def slices(self, n_experts: int) -> Slices:
        """This rank's experts, of a parameter whose first dimension is experts."""
        each = n_experts // self.size
        return Slices(0, n_experts, (Piece(self.rank * each, each, 1),))

    @eager
    def begin(self, x: Tensor, chosen: Tensor, n_experts: int) -> Travel:
        """Send the rows of x [T, d] by their experts, chosen [T, top_k]. Other work may be done before `Travel.arrive`."""
        rows = Rows.of(chosen, n_experts)
        ends = rows.ends.view(self.size, -1)
        counts = torch.diff(rows.ends, prepend=rows.ends.new_zeros(1)).view(self.size, -1)
        received = exchange_counts(counts, self.group)
        sizes = torch.stack((torch.diff(ends[:, -1], prepend=ends.new_zeros(1)), received.sum(1))).tolist()
        # From each rank come its rows in the order of this one's experts.
        experts = torch.arange(received.shape[1], device=x.device).repeat(self.size)
        experts = experts.repeat_interleave(received.flatten(), output_size=sum(sizes[1]))
        travel = Travel(rows, experts, sizes[0], sizes[1], _resolve_process_group(self.group))
        travel.sent = _Send.apply(take(x, rows), travel)
        return travel


class Travel:
    """Rows on their way to the ranks of their experts.

    experts: [received], of each row that arrives here, by its place among this rank's. out, back: rows for each rank, and of each.
    """

    sent: Tensor
    _pending: tuple[dist.Work, tuple[Tensor, ...]] | None = None

    def __init__(self, rows: Rows, experts: Tensor, out: list[int], back: list[int], group: dist.ProcessGroup):
        self.rows, self.experts, self.out, self.back, self.group = rows, experts, out, back, group

    @eager
    def arrive(self) -> Tensor:
        """The rows that have come, [received, d]."""
        sent, self.sent = self.sent, torch.empty(0)
        return _Arrive.apply(sent, self)

    @eager
    def send_back(self, y: Tensor, weights: Tensor) -> Tensor:
        """Outputs y [received, d] of the rows that came -> of this rank's tokens [T, d], the sums by weights [T, top_k]."""
        home = Travel(self.rows, self.experts, self.back, self.out, self.group)
        return combine(_Arrive.apply(_Send.apply(y, home), home), weights, self.rows)

    def start(self, rows: Tensor, reverse: bool = False) -> Tensor:
        """Begin to exchange rows; the result is there after `wait`."""
        out, back = (self.back, self.out) if reverse else (self.out, self.back)
        rows, found = rows.contiguous(), rows.new_empty(sum(back), rows.shape[1])
        work = dist.all_to_all_single(found, rows, back, out, group=self.group, async_op=True)
        assert work is not None
        self._pending = work, (rows, found)
        return found

    def wait(self) -> Tensor:
        assert self._pending is not None
        work, (_, found) = self._pending
        work.wait()
        self._pending = None
        return found


class _Send(torch.autograd.Function):
    """Begins to send rows; their gradients come back from `_Arrive`, which begins to send those. What autograd computes between
    the two runs beside the exchange, in both directions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        return travel.start(rows)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return ctx.travel.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, travel: Travel) -> Tensor:
        ctx.travel = travel
        return passed_on(travel.wait())

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        ctx.travel.start(d, reverse=True)
        return d, None  # _Send has the gradient, of another number of rows
