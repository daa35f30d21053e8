"""The learning rate at the landmarks of every schedule, what a schedule says of itself, and lengths that make none."""

import math
from pathlib import Path
from typing import Any

import pytest

from llmtrain.config.base import Duration
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule, resolve, schedule_problems
from llmtrain.schema.training import ScheduleConfig
from llmtrain.train.extend import with_duration
from tests.support.tiny import tiny_config

TOTAL = 100


def config(schedule: dict[str, Any], duration: str = f"{TOTAL} steps") -> Config:
    """lr = 1, so that rates are shares; 8 sequences of 32 tokens are 256 tokens a step."""
    changes = {"optimizer.lr": 1.0, "schedule": schedule, "train.duration": duration}
    return tiny_config(Path("shards"), Path("run"), changes)


def rate(schedule: dict[str, Any]) -> Schedule:
    return resolve(config(schedule))


WARMUP = {"warmup": "10 steps"}


@pytest.mark.parametrize(
    ("schedule", "landmarks"),
    [
        ({"type": "cosine", **WARMUP}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 200: 0.1}),
        ({"type": "cosine", **WARMUP, "final_lr_fraction": 0.0}, {10: 1.0, 40: 0.75, 55: 0.5, 70: 0.25, 100: 0.0}),
        ({"type": "linear", **WARMUP}, {0: 0.1, 10: 1.0, 55: 0.55, 100: 0.1}),
        ({"type": "linear", "final_lr_fraction": 0.5}, {0: 1.0, 50: 0.75, 100: 0.5}),
        ({"type": "constant", **WARMUP}, {0: 0.1, 9: 1.0, 99: 1.0}),
        ({"type": "inverse_sqrt", **WARMUP}, {0: 0.1, 9: 1.0, 10: 1.0, 40: 0.5, 90: 1 / 3}),
        ({"type": "wsd", **WARMUP, "decay": "20 steps"}, {0: 0.1, 10: 1.0, 80: 1.0, 90: 0.5, 95: 0.25, 100: 0.0}),
        ({"type": "wsd", "decay": "50 %", "final_lr_fraction": 0.2}, {0: 1.0, 50: 1.0, 75: 0.6, 100: 0.2}),
    ],
    ids=lambda value: value.get("type", ""),
)
def test_landmarks(schedule, landmarks):
    at = rate(schedule)
    assert {step: at(step) for step in landmarks} == pytest.approx(landmarks, abs=1e-12)


def test_a_cosine_is_one():
    at = rate({"type": "cosine", "final_lr_fraction": 0.0})
    assert [at(step) for step in range(TOTAL)] == pytest.approx(
        [(1 + math.cos(math.pi * step / TOTAL)) / 2 for step in range(TOTAL)]
    )


@pytest.mark.parametrize("warmup", ["20 steps", "5120 tokens", "5000 tokens", "20 %"])
def test_lengths_in_steps_tokens_and_fractions_agree(warmup):
    at = rate({"type": "cosine", "warmup": warmup})
    assert at.warmup == 20
    assert at(9) == pytest.approx(0.5)


def test_lengths_in_epochs():
    at = resolve(config({"type": "linear", "warmup": "0.5 epochs"}, "2 epochs"), steps_per_epoch=40)
    assert at.total == 80 and at.warmup == 20
    assert at(80) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({"type": "cosine", **WARMUP}, "warmup to 1 at step 10, cosine decay to 0.1 at step 100"),
        ({"type": "linear"}, "no warmup, 1 at step 1, linear decay to 0.1 at step 100"),
        ({"type": "constant", **WARMUP}, "warmup to 1 at step 10, constant to step 100"),
        ({"type": "constant", "warmup": "100 %"}, "warmup to 1 at step 100"),
        ({"type": "inverse_sqrt", **WARMUP}, "warmup to 1 at step 10, inverse_sqrt decay to 0.318 at step 100"),
        (
            {"type": "wsd", **WARMUP, "decay": "20 %"},
            "warmup to 1 at step 10, constant to step 80, linear decay to 0 at step 100",
        ),
        ({"type": "wsd", **WARMUP, "decay": "90 steps"}, "warmup to 1 at step 10, linear decay to 0 at step 100"),
        ({"type": "wsd", "decay": "0 steps"}, "no warmup, 1 at step 1, constant to step 100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedule_explains_what_it_is(schedule, text):
    assert str(rate(schedule)) == text


def problems(schedule: dict[str, Any], duration: str, steps_per_epoch: int | None = None) -> list[str]:
    made = config({}).model_copy(update={"schedule": ScheduleConfig.model_validate(schedule)})
    made = with_duration(made, Duration.parse(duration))
    return [f"{problem.path}: {problem.message}" for problem in schedule_problems(made, steps_per_epoch)]


INVERSE = {"type": "inverse_sqrt"}
WSD = {"type": "wsd"}


@pytest.mark.parametrize(
    ("schedule", "duration", "per_epoch", "path"),
    [
        # rounds to 0 steps: the rate would be lr * sqrt(0 / step)
        ({**INVERSE, "warmup": "0.1 %"}, "100 steps", None, "schedule.warmup"),
        ({**INVERSE, "warmup": "0.001 epochs"}, "100 steps", 16, "schedule.warmup"),
        ({**WSD, "decay": "0.1 %"}, "100 steps", None, "schedule.decay"),
        ({}, "0.01 epochs", 16, "train.duration"),
        # too long, in every pair of units
        ({"warmup": "11 steps"}, "10 steps", None, "schedule.warmup"),
        ({"warmup": "11 steps"}, "2560 tokens", None, "schedule.warmup"),
        ({"warmup": "2817 tokens"}, "10 steps", None, "schedule.warmup"),
        ({"warmup": "200 steps"}, "2 epochs", 16, "schedule.warmup"),
        ({"warmup": "8449 tokens"}, "2 epochs", 16, "schedule.warmup"),
        ({"warmup": "3 epochs"}, "40 steps", 16, "schedule.warmup"),
        ({"warmup": "3 epochs"}, "2 epochs", None, "schedule.warmup"),
        ({**WSD, "warmup": "20 steps", "decay": "1 epochs"}, "30 steps", 16, "schedule.decay"),
        ({**WSD, "warmup": "51 %", "decay": "1 epochs"}, "2 epochs", None, "schedule.decay"),
        ({**WSD, "warmup": "60 %", "decay": "60 %"}, "100 steps", None, "schedule.decay"),
    ],
    ids=str,
)
def test_lengths_that_make_no_schedule(schedule, duration, per_epoch, path):
    [problem] = problems(schedule, duration, per_epoch)
    assert problem.startswith(path)


@pytest.mark.parametrize(
    ("schedule", "duration", "per_epoch"),
    [
        ({"warmup": "200 steps"}, "2 epochs", None),  # an epoch may be longer
        ({"warmup": "200 steps"}, "2 epochs", 100),
        ({**INVERSE, "warmup": "0.001 epochs"}, "2 epochs", None),
        ({**INVERSE, "warmup": "1 %"}, "100 steps", None),
        ({"warmup": "100 steps"}, "100 steps", None),
        ({"warmup": "1 %"}, "10 steps", None),  # a short trial of a long config has no warmup
        ({**WSD, "warmup": "10 %", "decay": "90 %"}, "15 steps", None),  # 2 + 14 steps when rounded
        ({**WSD, "warmup": "300 tokens", "decay": "2300 tokens"}, "2600 tokens", None),  # 2 + 9 of 11
        ({**WSD, "warmup": "0.3 epochs", "decay": "0.7 epochs"}, "1 epochs", 15),
    ],
    ids=str,
)
def test_lengths_that_fit(schedule, duration, per_epoch):
    assert problems(schedule, duration, per_epoch) == []
    if per_epoch or "epochs" not in duration:
        made = with_duration(config({}), Duration.parse(duration))
        at = resolve(made.model_copy(update={"schedule": ScheduleConfig.model_validate(schedule)}), per_epoch)
        assert at.warmup + at.decay <= at.total
        assert all(at(step) > 0 for step in range(at.total))
