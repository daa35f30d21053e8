"""An agreement between ranks on who ran out of memory, before each collective of FSDP2.

A rank that fails in the middle of a pass takes part in none of its later collectives, for which the others would wait until the
process group times out. Here all ranks first exchange a flag in host memory, so that none begins a collective that another will
not join. That costs a round trip of the host for each: it is for trials.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from llmtrain.distributed.world import gloo_group


class OutOfMemoryElsewhere(RuntimeError):
    """Another rank ran out of memory in this pass."""

    def __init__(self) -> None:
        super().__init__("out of memory on another rank")


class MemoryAgreement:
    """The exchange of flags of all ranks, which all make one. With one rank there is nothing to exchange.

    Between two exchanges a rank either does as the others do or fails and calls `failed`.
    """

    def __init__(self) -> None:
        self.group = gloo_group() if dist.get_world_size() > 1 else None

    def agree(self) -> None:
        """Go on, if all ranks do. Raises OutOfMemoryElsewhere."""
        if self._any(False):
            raise OutOfMemoryElsewhere

    def failed(self) -> None:
        """Tell the others, who are about to begin a collective or at the end of the pass."""
        self._any(True)

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)

    @contextlib.contextmanager
    def before_collectives(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile FSDP2 gathers parameters and reduces gradients only where all ranks agree. Collectives within layers
        (train.parallel) are not covered."""
        groups: list[Any] = []
        if self.group is not None:
            states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
            groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        kept = [(group, group._all_gather_comm, group._reduce_scatter_comm) for group in groups]
        for group, gather, reduce in kept:
            group._all_gather_comm, group._reduce_scatter_comm = _Agreed(gather, self), _Agreed(reduce, self)
        try:
            yield
        finally:
            for group, gather, reduce in kept:
                group._all_gather_comm, group._reduce_scatter_comm = gather, reduce

    def _any(self, failed: bool) -> bool:
        if self.group is None:
            return False
        flag = torch.tensor(int(failed))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)


class _Agreed:
    """A collective of FSDP2, after an agreement. Memory is allocated before it, by `allocate`."""

    def __init__(self, collective: Any, agreement: MemoryAgreement):
        self.collective, self.agreement = collective, agreement

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.collective.allocate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.agreement.agree()
        return self.collective(*args, **kwargs)
