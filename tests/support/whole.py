"""Tensors of a model in one piece, wherever the ranks of a test hold their parts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llmtrain.models.init import clean_name
from llmtrain.models.slices import boxes, local_of
from llmtrain.models.tensor_parallel import slices_of


def whole_tensors(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """A tensor of each parameter that has one, by the parameter's clean name. Every rank calls this.

    of: a parameter -> itself, its gradient, or something of the same shape. Ranks that hold the same part must agree.
    """
    slices, found = slices_of(model), {}
    for name, parameter in model.named_parameters():
        tensor: Any = of(parameter)
        if tensor is None:
            continue
        held = slices.get(clean_name(name))
        local = local_of(tensor)
        whole = local.new_zeros(2, *(held.shape(tensor.shape) if held else tensor.shape))
        places = [
            (tuple(slice(at, at + n) for at, n in zip(box.begin, box.sizes, strict=True)), local[box.at])
            for box in boxes(tensor, held)
        ]
        for place, part in places:
            whole[0][place] += part
            whole[1][place] += 1
        dist.all_reduce(whole)
        mean = whole[0] / whole[1]
        for place, part in places:
            torch.testing.assert_close(
                part, mean[place], rtol=1e-6, atol=1e-9, msg=f"{name} differs between its holders"
            )
        found[clean_name(name)] = mean
    return found
