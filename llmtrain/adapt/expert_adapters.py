"""Low-rank adapters of all experts' matrices: for each expert A and B of its own, as peft has them of target_parameters."""

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmtrain.adapt.adapters import Unit
from llmtrain.models.feed_forward.experts import ExpertWeights
from llmtrain.models.init import InitScale, Rule, constant, uniform
from llmtrain.models.slices import shard_parameter, shards_of


class ExpertAdapter(nn.Module):
    """weight [n, rows, columns] -> weight + scale * up @ down, with down [n, rank, columns] and up [n, rows, rank].

    Computed for all experts at once, whatever tokens meet them: experts' kernels read one matrix each. experts: on the meta device,
    after expert-parallel ranks divided them. matrix: the parameter's name.
    """

    def __init__(self, experts: ExpertWeights, matrix: str, unit: Unit):
        super().__init__()
        self.units = [unit]
        divided = shards_of(experts).get(matrix)
        n, rows, columns = experts.get_parameter(matrix).shape
        n = n if divided is None else divided.whole
        self.down = nn.Parameter(torch.empty(n, unit.rank, columns))
        self.up = nn.Parameter(torch.empty(n, rows, unit.rank))
        if divided is not None:
            shard_parameter(self, "down", divided)
            shard_parameter(self, "up", divided)

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        bound = 1 / math.sqrt(self.down.shape[2])
        return {"down": uniform(-bound, bound), "up": constant(0.0)}

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, self.up, self.down, alpha=self.units[0].scale)


class _Adapted:
    """The first base of the class of experts that have adapters."""

    lora: nn.ModuleDict

    def matrix(self, name: str) -> Tensor:
        weight = cast("Any", super()).matrix(name)
        return self.lora[name](weight) if name in self.lora else weight

    def is_trained(self, name: str) -> bool:
        return name in self.lora or cast("Any", super()).is_trained(name)


@functools.cache
def adapted_experts(kind: type) -> type[Any]:
    """The class of experts of this kind with adapters in `lora`, by the matrix that they change."""
    return type(f"Adapted{kind.__name__}", (_Adapted, kind), {})
