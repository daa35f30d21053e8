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
    mine: dict[str, Any] = {clean_name(name): of(parameter) for name, parameter in model.named_parameters()}
    mine = {name: tensor for name, tensor in mine.items() if tensor is not None}
    shapes = {
        name: (slices[name].shape(tensor.shape) if name in slices else tensor.shape, tensor.dtype)
        for name, tensor in mine.items()
    }
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, shapes)  # a stage of a pipeline has some parameters alone
    for name, (shape, dtype) in {name: one for some in everyone for name, one in some.items()}.items():
        held, tensor = slices.get(name), mine.get(name)
        local = torch.zeros(0) if tensor is None else local_of(tensor)
        whole = torch.zeros(2, *shape, dtype=dtype, device=local.device)
        places = (
            []
            if tensor is None
            else [
                (tuple(slice(at, at + n) for at, n in zip(box.begin, box.sizes, strict=True)), local[box.at])
                for box in boxes(tensor, held)
            ]
        )
        for place, part in places:
            whole[0][place] += part
            whole[1][place] += 1
        dist.all_reduce(whole)
        mean: Tensor = whole[0] / whole[1]
        for place, part in places:
            torch.testing.assert_close(
                part, mean[place], rtol=1e-6, atol=1e-9, msg=f"{name} differs between its holders"
            )
        found[name] = mean
    return found
