"""AdamW: PyTorch's own, on this rank's shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmtrain.models.parameters import Parameters
from llmtrain.models.slices import local_of
from llmtrain.schema.optimizers import AdamW8bitConfig, AdamWConfig, MuonConfig


def build(config: AdamWConfig, groups: list[dict[str, Any]], parameters: Parameters) -> torch.optim.AdamW:
    """One fused kernel per group (on CPUs too: one operator instead of a dozen per DTensor)."""
    return ShardedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW, whose update reads and writes local tensors. State and checkpoints have DTensors.

    The host decides whether to take a step when the GPU has nothing else to do; the operator on some hundred DTensors would then
    keep it waiting for 20 ms (520 parameters, measured on a CPU), the same on their local tensors for 3.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists, of parameters, gradients and their state."""
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return has_complex


class AdamWBesideMatrices(ShardedAdamW):
    """Steps groups without matrices as AdamW does, and leaves those of matrices to `step_matrices`.

    Divides the groups further: each is wholly of matrices, or has none.
    """

    def __init__(self, groups: list[dict[str, Any]], parameters: Parameters, config: AdamW8bitConfig | MuonConfig):
        self.matrices = {one: info.matrix_rows for one, info in parameters.items() if info.matrix_rows}
        groups = [
            {**group, "params": chosen}
            for group in groups
            for kind in (True, False)
            if (chosen := [parameter for parameter in group["params"] if (parameter in self.matrices) == kind])
        ]
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if group["params"][0] not in self.matrices]
            super().step()
        finally:
            self.param_groups = groups
        self.step_matrices([group for group in groups if group["params"][0] in self.matrices])
        return loss

    def step_matrices(self, groups: list[dict[str, Any]]) -> None:
        raise NotImplementedError
