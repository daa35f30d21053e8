"""Saves at intervals and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, Event, State
from composer.loggers import Logger
from torch import nn

from llmtrain.checkpoint import store


class Checkpointing(Callback):
    """Writes a checkpoint every `interval` steps and after the last one."""

    def __init__(
        self,
        root: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        data_position: Callable[[State], dict[str, Any]],
        interval: int,
        keep_last: int | None,
    ):
        self.root = root
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.data_position = data_position
        self.interval = interval
        self.keep_last = keep_last

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        last = state.max_duration is not None and state.timestamp >= state.max_duration
        if event == Event.BATCH_CHECKPOINT and (step % self.interval == 0 or last):
            self.save(state)

    def save(self, state: State) -> Path:
        clock = state.timestamp.state_dict()
        return store.save(
            self.root,
            self.model,
            self.optimizer,
            step=state.timestamp.batch.value,
            tokens=state.timestamp.token.value,
            config=self.config,
            clock={key: value for key, value in clock.items() if isinstance(value, int)},
            data=self.data_position(state),
            keep_last=self.keep_last,
        )
