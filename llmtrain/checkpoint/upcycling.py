"""Experts that begin as copies of a dense MLP, changed or not (init_from.upcycle). The same on any number of ranks."""

import torch
from torch import Tensor

from llmtrain.models.init import fill, normal, uniform
from llmtrain.models.slices import Slices, boxes, local_of
from llmtrain.schema.init_from import InitialWeights


@torch.no_grad()
def copy_to_experts(
    experts: Tensor, slices: Slices | None, dense: Tensor, name: str, d_ff: int, wanted: InitialWeights, seed: int
) -> None:
    """Fill a tensor of a layer's experts [n_experts, ...], or what this process holds of it, with copies of a dense one [...].

    name: the tensor's in the model, which with `seed` decides what is drawn. slices: as of `fill`. d_ff: hidden channels.
    """
    local, dense = local_of(experts), dense.to(local_of(experts).device)
    local.copy_(dense.expand(local.shape))
    if wanted.upcycle_noise:
        local += _drawn(experts, slices, wanted.upcycle_noise * _root_mean_square(dense), f"{name} noise", seed)
    if wanted.upcycle_drop and (axis := _HIDDEN[name.rpartition(".")[2]]) is not None:
        of_mlp = dense - dense.mean()
        fresh = _drawn(experts, slices, _root_mean_square(of_mlp), f"{name} fresh", seed) + dense.mean()
        order = torch.empty(slices.whole if slices else len(experts), d_ff)
        fill(order, uniform(0, 1), f"{name.rpartition('.')[0]} dropped", seed)
        of_all = order.argsort(1) < round(wanted.upcycle_drop * d_ff)
        for box in boxes(experts, slices):
            part = local[box.at]
            dropped = of_all[box.begin[0] : box.begin[0] + len(part)].to(local.device)
            dropped = dropped.repeat(1, part.shape[axis] // d_ff)  # gate and up of a channel go together
            shape = [len(part), *(n if i == axis else 1 for i, n in enumerate(part.shape[1:], start=1))]
            part.copy_(torch.where(dropped.view(shape), fresh[box.at], part))


_HIDDEN = {"w_in": 1, "b_in": 1, "w_out": 2, "b_out": None}
"""The dimension of the hidden channels of each tensor of experts."""


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _drawn(experts: Tensor, slices: Slices | None, std: float, name: str, seed: int) -> Tensor:
    """Random numbers for what this process holds."""
    drawn = torch.empty_like(experts)
    fill(drawn, normal(std), name, seed, slices)
    return local_of(drawn)
