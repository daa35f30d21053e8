"""AdamW, PyTorch's own."""

from __future__ import annotations

from typing import Any

import torch

from llmtrain.models.parameter_roles import Matrices
from llmtrain.schema.optimizers import AdamWConfig


def build(config: AdamWConfig, groups: list[dict[str, Any]], matrices: Matrices) -> torch.optim.AdamW:
    """One fused kernel per group (on CPUs too: one operator instead of a dozen per DTensor)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def divided_by_matrices(groups: list[dict[str, Any]], matrices: Matrices) -> list[dict[str, Any]]:
    """The groups, each of matrices alone or of other parameters alone."""
    return [
        {**group, "params": chosen}
        for group in groups
        for kind in (True, False)
        if (chosen := [parameter for parameter in group["params"] if (parameter in matrices) == kind])
    ]
