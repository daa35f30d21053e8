"""An optimizer over decay groups, and the learning rate as a function of the step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Container
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import nn

from llmtrain.models.mixers.base import no_decay_parameters
from llmtrain.schema.config import Config
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.training import ScheduleConfig


def decays(name: str, parameter: torch.Tensor, exempt: Container[str], decay_embeddings: bool = True) -> bool:
    """True where weight decay applies: matrices and convolution kernels yes; norms, biases and what mixers exempt no."""
    if parameter.ndim < 2 or name in exempt:
        return False
    return decay_embeddings or not name.startswith(("embed.", "positions."))


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that the section names, over two groups of parameters: with weight decay, and without."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    exempt = no_decay_parameters(model)
    for name, parameter in model.named_parameters():
        groups[decays(name, parameter, exempt, config.decay_embeddings)].append(parameter)
    optimizer = importlib.import_module(f"llmtrain.train.optimizers.{config.type}")
    decay = {True: config.weight_decay, False: 0.0}
    return optimizer.build(config, [{"params": groups[key], "weight_decay": decay[key]} for key in (True, False)])


class LearningRate(Callback):
    """Sets the learning rate at the start of each step, from the schedule of a config resolved to steps.

    A pure function of the step: a resumed run needs no state of it. Composer's own schedulers run one step late and keep
    state.
    """

    def __init__(self, config: Config, total_steps: int, steps_per_epoch: int | None):
        self.schedule = schedule = config.schedule
        self.lr, self.total = config.optimizer.lr, total_steps
        length: dict[str, Any] = {"tokens_per_step": config.tokens_per_step, "steps_per_epoch": steps_per_epoch}
        self.warmup = schedule.warmup.steps(**length, total_steps=total_steps)
        self.decay = schedule.decay.steps(**length, total_steps=total_steps) if schedule.decay else 0

    def batch_start(self, state: State, logger: Logger) -> None:
        rate = self(state.timestamp.batch.value)
        for group in state.optimizers[0].param_groups:
            group["lr"] = rate
        logger.log_metrics({"optimizer/lr": rate})

    def __call__(self, step: int) -> float:
        """step: optimizer steps already taken (0 for the first)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * self._shape(self.schedule, step)

    def _shape(self, schedule: ScheduleConfig, step: int) -> float:
        if schedule.type == "constant":
            return 1.0
        if schedule.type == "inverse_sqrt":
            return math.sqrt(self.warmup / max(step, 1))
        start = self.total - self.decay if schedule.type == "wsd" else self.warmup
        if step < start:
            return 1.0
        progress = min((step - start) / max(self.total - start, 1), 1.0)
        final = schedule.final_lr_fraction
        if final is None:
            final = 0.0 if schedule.type == "wsd" else 0.1
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.type == "cosine" else 1 - progress
        return final + (1 - final) * falling
