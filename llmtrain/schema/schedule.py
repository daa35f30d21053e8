"""The learning rate as a function of the step: a `schedule` section whose lengths are resolved to steps. No torch here."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from llmtrain.config.base import Duration, Problem
from llmtrain.schema.optimizers import OptimizerConfig
from llmtrain.schema.training import ScheduleConfig, TrainConfig


class Lengths(Protocol):
    """The part of a Config that makes its schedule."""

    @property
    def train(self) -> TrainConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def tokens_per_step(self) -> int: ...


@dataclass(frozen=True)
class Schedule:
    """A pure function of the step: a resumed run needs no state of it.

    type: that of ScheduleConfig. lr: the peak. total, warmup, decay: in optimizer steps. final: the share of the peak that the
    decay ends at.
    """

    type: str
    lr: float
    total: int
    warmup: int
    decay: int
    final: float

    def __call__(self, step: int) -> float:
        """step: optimizer steps already taken (0 for the first)."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * self._shape(step)

    def _shape(self, step: int) -> float:
        if self.type == "constant":
            return 1.0
        if self.type == "inverse_sqrt":
            return math.sqrt(self.warmup / max(step, 1))
        start = self.decay_start
        if step < start:
            return 1.0
        progress = min((step - start) / max(self.total - start, 1), 1.0)
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if self.type == "cosine" else 1 - progress
        return self.final + (1 - self.final) * falling

    @property
    def decay_start(self) -> int:
        """Steps taken when the rate begins to fall; `total` where it does not. What was trained until then serves a run of
        another length too."""
        if self.type == "constant":
            return self.total
        return self.total - self.decay if self.type == "wsd" else self.warmup

    def __str__(self) -> str:
        """`warmup to 0.0003 at step 100, constant to step 800, linear decay to 0 at step 1,000`."""
        peak, end, start = f"{self.lr:.3g}", f"at step {self.total:,}", self.decay_start
        parts = [f"warmup to {peak} at step {self.warmup:,}" if self.warmup else f"no warmup, {peak} at step 1"]
        if self.warmup < start <= self.total and self.type in ("constant", "wsd"):
            parts.append(f"constant to step {start:,}")
        if self.type == "inverse_sqrt" and self.warmup < self.total:
            parts.append(f"inverse_sqrt decay to {self(self.total - 1):.3g} {end}")
        elif start < self.total:
            shape = "cosine" if self.type == "cosine" else "linear"
            parts.append(f"{shape} decay to {self.lr * self.final:.3g} {end}")
        return ", ".join(parts)


def resolve(config: Lengths, steps_per_epoch: int | None = None) -> Schedule:
    """The schedule of a config in steps; `schedule_problems` says whether it makes sense.

    Raises UserError for a length in epochs when steps_per_epoch is None.
    """
    section, duration = config.schedule, config.train.duration
    tokens = config.tokens_per_step
    total = duration.steps(tokens_per_step=tokens, steps_per_epoch=steps_per_epoch, total_steps=None)

    def steps(part: Duration | None) -> int:
        if part is None:
            return 0
        return part.steps(tokens_per_step=tokens, steps_per_epoch=steps_per_epoch, total_steps=total)

    warmup, final = steps(section.warmup), section.final_lr_fraction
    if final is None:
        final = 0.0 if section.type == "wsd" else 0.1
    # Lengths that fill the run exactly may exceed it by a step when each of them is rounded.
    decay = max(min(steps(section.decay), total - warmup), 0)
    return Schedule(section.type, config.optimizer.lr, total, warmup, decay, final)


def schedule_problems(config: Lengths, steps_per_epoch: int | None = None) -> Iterator[Problem]:
    """Problems of the lengths of a run, with the paths of the whole config.

    steps_per_epoch: None where it is not known; then nothing is said of what depends on it.
    """
    section, duration = config.schedule, config.train.duration
    parts = {"schedule.warmup": section.warmup}
    if section.decay is not None:
        parts["schedule.decay"] = section.decay
    units = {duration.unit, *(part.unit for part in parts.values())}
    known = "epochs" not in units or steps_per_epoch is not None
    if not known and not units <= {"epochs", "fraction"}:
        return
    # Where all lengths are in epochs, they compare alike whatever an epoch is.
    per = {"steps": 1.0, "tokens": 1 / config.tokens_per_step, "epochs": float(steps_per_epoch or 1)}
    whole = duration.value * per[duration.unit]
    per["fraction"] = whole
    schedule = resolve(config, steps_per_epoch) if known else None
    length = sum(part.value * per[part.unit] for part in parts.values())
    if length > (1 + 1e-9) * max(whole, schedule.total if schedule else 0):
        last = list(parts)[-1]
        what = "warmup and decay together are" if len(parts) > 1 else "the warmup is"
        steps = f": {length:,.10g} steps of {schedule.total:,}" if schedule else ""
        yield Problem(last, str(parts[last]), f"{what} longer than train.duration ({duration}){steps}")
    elif schedule is None:
        return
    elif schedule.total < 1:
        yield Problem("train.duration", str(duration), "is less than one step")
    elif section.type == "inverse_sqrt" and schedule.warmup < 1:  # the section itself refuses `0 steps`
        yield Problem(
            "schedule.warmup",
            str(section.warmup),
            f"is less than one of {schedule.total:,} steps; inverse_sqrt needs one or more, as its rate is "
            "lr * sqrt(warmup / step)",
        )
    elif section.decay is not None and section.decay.value > 0 and schedule.decay < 1:
        yield Problem(
            "schedule.decay",
            str(section.decay),
            f"is less than one of {schedule.total:,} steps, so that the rate would never fall",
        )
