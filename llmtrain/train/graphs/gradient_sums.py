"""Sums of the gradients of several microbatches, which FSDP2 keeps whole until it reduces them, by our kernel: PyTorch's for two
formats moves two thirds of the bytes in a second (kernels/accumulate.py)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from llmtrain.train.graphs.persistent_weights import group_of, local_parts


def sum_by_our_kernel(model: nn.Module) -> None:
    """Have FSDP2 add each further microbatch's gradients to their sums by `accumulate`, where they wait for the last one of a
    step. Needs Triton."""
    groups = [group_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    for group in filter(None, groups):
        for parameter in group.fsdp_params:
            # On the object: FSDP2 has no place for another sum.
            parameter.accumulate_unsharded_grad_if_needed = partial(_add, parameter)


def _add(parameter: Any) -> None:
    """FSDPParam.accumulate_unsharded_grad_if_needed, by our kernel."""
    from llmtrain.kernels.accumulate import accumulate

    total = parameter.unsharded_accumulated_grad
    if total is None or parameter.unsharded_param.grad is None:
        return
    accumulate(*local_parts([total, parameter.unsharded_param.grad]))
    parameter.unsharded_param.grad = None
