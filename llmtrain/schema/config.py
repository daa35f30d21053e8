"""The whole YAML of a run. Sections are in the files beside this one; rules that span sections are here. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from llmtrain.config.base import Problem, Section, free
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.schema.data import DataConfig
from llmtrain.schema.init_from import InitialWeights
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.training import (
    CheckpointConfig,
    EvalConfig,
    LoggingConfig,
    ScheduleConfig,
    TrainConfig,
)


class Config(Section):
    """Settings of one run: the model, its data, and how it is trained."""

    name: str = free()
    """Name of the run: letters, digits, '.', '_' and '-'."""
    run_dir: str = free("runs/${name}")
    """Folder of checkpoints, logs and plots."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 17
    """Seed of the initial weights, of dropout, and (with data.shuffle_seed) of the sample order."""
    init_from: InitialWeights | None = None
    """Weights to start from, as a path or a mapping: a run's folder, a checkpoint, or what `llmtrain import` wrote; also in a
    store, s3://bucket/prefix. Optimizer, schedule and data begin anew. Not read once the run has a checkpoint of its own; a
    changed value is then refused as another run."""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = free(EvalConfig())
    checkpoint: CheckpointConfig = free(CheckpointConfig())
    logging: LoggingConfig = free(LoggingConfig())

    def problems(self) -> Iterator[Problem]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield Problem("name", self.name, "use letters, digits, '.', '_' and '-' only")
        if self.data.seq_len > self.model.max_seq_len:
            yield Problem(
                "data.seq_len", self.data.seq_len, f"must not exceed model.max_seq_len ({self.model.max_seq_len})"
            )
        prepare = self.data.prepare
        if prepare and prepare.vocab_size and prepare.vocab_size > self.model.vocab_size:
            yield Problem(
                "data.prepare.vocab_size",
                prepare.vocab_size,
                f"must not exceed model.vocab_size ({self.model.vocab_size})",
            )
        yield from self._duration_problems()

    def _duration_problems(self) -> Iterator[Problem]:
        parts = {"schedule.warmup": self.schedule.warmup, "schedule.decay": self.schedule.decay}
        total = self.train.duration
        steps = {}
        for path, part in parts.items():
            if part is None:
                continue
            if "epochs" in (part.unit, total.unit) and part.unit not in (total.unit, "fraction"):
                continue  # the length of an epoch is known only once the data is
            steps[path] = self._in_steps(part) if part.unit != "epochs" else part.value
        whole = total.value if total.unit == "epochs" else self._in_steps(total)
        if len(steps) == len([p for p in parts.values() if p is not None]) and sum(steps.values()) > whole:
            last = list(steps)[-1]
            yield Problem(last, str(parts[last]), f"warmup and decay together are longer than train.duration ({total})")

    def _in_steps(self, part) -> float:
        if part.unit == "fraction":
            total = self.train.duration
            return part.value * (total.value if total.unit == "epochs" else self._in_steps(total))
        if part.unit == "tokens":
            return part.value / self.tokens_per_step
        return part.value

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.data.seq_len

    def grad_accum(self, world_size: int) -> int:
        """Microbatches per step and rank. Raises UserError if the batch cannot be split so."""
        per_rank, rest = divmod(self.train.global_batch_size, world_size)
        if rest or per_rank % self.train.microbatch_size:
            raise UserError(
                f"train.global_batch_size = {self.train.global_batch_size} cannot be split over {world_size} ranks "
                f"in microbatches of train.microbatch_size = {self.train.microbatch_size}; "
                f"it must be a multiple of {world_size * self.train.microbatch_size}"
            )
        return per_rank // self.train.microbatch_size
