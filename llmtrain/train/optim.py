"""An optimizer over groups of parameters that share their settings, and the callback that sets its learning rates."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import nn

from llmtrain.models.parameters import parameter_info
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.parameter_groups import parameter_settings
from llmtrain.schema.schedule import Schedule
from llmtrain.train.optimizers.host_state import keep_on_host


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the section names. Each of its groups has the peak learning rate as `lr`, and a weight decay; those of
    the section come first, with decay and without. Frozen parameters are in none.

    Raises UserError for entries of optimizer.groups that fit no parameter of a whole model.
    """
    parameters = parameter_info(model, config.decay_embeddings)
    settings = parameter_settings(config, parameters.values(), getattr(model, "is_whole", True))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {(config.lr, config.weight_decay): [], (config.lr, 0.0): []}
    for parameter, info in parameters.items():
        if not info.trainable:
            continue
        of = settings[info.name]
        groups.setdefault((of.lr, of.weight_decay), []).append(parameter)
    optimizer = importlib.import_module(f"llmtrain.train.optimizers.{config.type}")
    made: list[dict[str, Any]] = [
        {"params": some, "lr": lr, "weight_decay": decay} for (lr, decay), some in groups.items() if some
    ]
    built = optimizer.build(config, made, parameters)
    if config.offload:
        keep_on_host(built)
    return built


def learning_rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Present learning rate of each group: after `build_optimizer`, the peak."""
    return [group["lr"] for group in optimizer.param_groups]


class LearningRate(Callback):
    """Sets the learning rates at the start of each step. Composer's own schedulers run one step late and keep state.

    peaks: of the optimizer's groups; the schedule gives each the same share of its peak.
    """

    def __init__(self, schedule: Schedule, peaks: Sequence[float]):
        self.schedule = schedule
        self.factors = [peak / schedule.lr for peak in peaks]

    def batch_start(self, state: State, logger: Logger) -> None:
        rate = self.schedule(state.timestamp.batch.value)
        for group, factor in zip(state.optimizers[0].param_groups, self.factors, strict=True):
            group["lr"] = rate * factor
        logger.log_metrics({"optimizer/lr": rate})
