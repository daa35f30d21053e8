"""The moving average of the weights (train.ema), kept beside them."""

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmtrain.models.parameters import parameter_info
from llmtrain.schema.training import AverageConfig


class WeightAverage(Callback):
    """average += (1 - decay) (weight - average) after each step, in fp32, each rank for its shards of what is trained.

    In a checkpoint (save_load.Part) the averages are `ema.NAME`, beside the parameters' `model.NAME`. A run that does not resume
    calls `begin` once its weights are set.
    """

    def __init__(self, model: nn.Module, config: AverageConfig):
        self.config = config
        self.weights = {info.name: one for one, info in parameter_info(model).items() if info.trainable}
        self.averages = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    @torch.no_grad()
    def begin(self) -> None:
        """The averages of no step: the weights themselves."""
        for average, weight in zip(_local(self.averages), _local(self.weights), strict=True):
            average.copy_(weight)

    @torch.no_grad()
    def batch_end(self, state: State, logger: Logger) -> None:
        decay = self.config.decay_of(state.timestamp.batch.value)
        torch._foreach_lerp_(_local(self.averages), _local(self.weights), 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {f"ema.{name}": average for name, average in self.averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: a checkpoint is loaded into the averages themselves."""


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """This rank's shards. Asked for at every step: FSDP2 may give a parameter other memory, as when it pads a shard."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
