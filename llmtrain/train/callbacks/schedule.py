"""Sets the learning rate at the start of each step."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger

from llmtrain.train.optim import LearningRate


class Schedule(Callback):
    """Composer's own schedulers run one step late and keep state; this is a pure function of the step."""

    def __init__(self, learning_rate: LearningRate):
        self.learning_rate = learning_rate

    def batch_start(self, state: State, logger: Logger) -> None:
        rate = self.learning_rate(state.timestamp.batch.value)
        for group in state.optimizers[0].param_groups:
            group["lr"] = rate
        logger.log_metrics({"optimizer/lr": rate})
