"""Learning rate and weight decay of a migrated config, step by step, against Composer's own schedulers and optimizer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Time, Timestamp
from composer.optim import (
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
)

from llmtrain.schema.optimizers import AdamWConfig
from llmtrain.schema.schedule import resolve
from llmtrain.train.optimizers.adamw import build
from tests.support.foundry import left, migrated, our_config

STEPS, BATCH, SEQ_LEN, LR = 100, 24, 64, 2e-3
COMPOSER: dict[str, Any] = {
    "cosine_with_warmup": CosineAnnealingWithWarmupScheduler,
    "linear_decay_with_warmup": LinearWithWarmupScheduler,
    "constant_with_warmup": ConstantWithWarmupScheduler,
}


def composer_rate(scheduler: Any, step: int, duration: str) -> float:
    """Composer's rate for the time after `step` steps."""
    time = Timestamp(batch=step, token=step * BATCH * SEQ_LEN, sample=step * BATCH)
    state = SimpleNamespace(timestamp=time, max_duration=Time.from_timestring(duration), dataloader_len=None)
    return LR * scheduler(state)


@pytest.mark.parametrize("duration", ["100ba", f"{STEPS * BATCH * SEQ_LEN}tok"])
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "cosine_with_warmup", "t_warmup": "10ba", "alpha_f": 0.05},
        {"name": "cosine_with_warmup", "t_warmup": "0.25dur"},
        {"name": "cosine_with_warmup", "t_warmup": "0ba", "alpha_f": 0.1, "t_max": "1dur"},
        {"name": "linear_decay_with_warmup", "t_warmup": "10ba"},
        {"name": "linear_decay_with_warmup", "t_warmup": "10ba", "alpha_i": 0.5, "alpha_f": 0.2},
        {"name": "constant_with_warmup", "t_warmup": "10ba"},
        {"name": "constant_with_warmup", "t_warmup": "10ba", "alpha": 0.25},
    ],
    ids=str,
)
def test_the_rate_of_every_step(settings, duration, tmp_path):
    """Our warmup begins with 1/n of the peak, Composer's with 0: step s has what Composer's time s + 1 has."""
    if duration.endswith("tok"):  # Composer wants both in the same unit
        settings = {
            key: f"{int(value[:-2]) * BATCH * SEQ_LEN}tok" if str(value).endswith("ba") else value
            for key, value in settings.items()
        }
    config = our_config(tmp_path, {"scheduler": settings, "max_duration": duration})
    ours = resolve(config, None)
    theirs = COMPOSER[settings["name"]](**{key: value for key, value in settings.items() if key != "name"})
    for step in range(STEPS):
        expected = composer_rate(theirs, step + 1 if step < ours.warmup else step, duration)
        assert ours(step) == pytest.approx(expected, rel=1e-9), step


def test_a_warmup_longer_than_the_run_rises_as_far_as_composers(tmp_path):
    config = our_config(tmp_path, {"scheduler.t_warmup": "400ba"})
    theirs = CosineAnnealingWithWarmupScheduler(t_warmup="400ba", alpha_f=0.05)
    ours = resolve(config, None)
    assert [ours(step) for step in range(STEPS)] == pytest.approx(
        [composer_rate(theirs, step + 1, "100ba") for step in range(STEPS)]
    )


def test_inverse_square_root(tmp_path):
    """LLM Foundry's formula: 1 / sqrt((t - warmup + scale) / scale)."""
    settings = {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "t_scale": "10ba", "t_cooldown": "0ba"}
    made = migrated(tmp_path, {"scheduler": settings})
    ours = resolve(our_config(tmp_path, {"scheduler": settings}), None)
    assert left(made) == {}
    assert [ours(step) for step in range(10, STEPS)] == pytest.approx(
        [LR / (step / 10) ** 0.5 for step in range(10, STEPS)]
    )


@pytest.mark.parametrize(
    "scheduler",
    [
        {"name": "cosine_with_warmup", "t_warmup": "4ba"},
        {"name": "constant_with_warmup", "t_warmup": "4ba", "alpha": 0.5},
        {"name": "cosine_with_warmup", "t_warmup": "400ba"},
    ],
    ids=str,
)
def test_weight_decay_of_every_step(scheduler, tmp_path):
    """Composer's decay of a step is weight_decay * lr / (lr in the file); AdamW's is weight_decay * lr."""
    config = our_config(tmp_path, {"scheduler": scheduler, "optimizer.weight_decay": 3e-2})
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(3, 4)) for _ in range(2))
    assert isinstance(config.optimizer, AdamWConfig)
    groups = [{"params": [ours], "weight_decay": config.optimizer.weight_decay}]
    adamw = build(config.optimizer, groups, parameters={})
    composer = DecoupledAdamW([theirs], lr=LR, betas=(0.9, 0.97), eps=1e-9, weight_decay=3e-2)
    rate = resolve(config, None)
    generator = torch.Generator().manual_seed(0)
    for step in range(0, STEPS, 5):
        gradient = torch.randn(3, 4, generator=generator)
        for parameter, optimizer in ((ours, adamw), (theirs, composer)):
            parameter.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_default_weight_decay_is_composers(tmp_path):
    config = our_config(tmp_path, {"optimizer": {"name": "decoupled_adamw", "lr": LR}})
    assert config.optimizer.weight_decay == pytest.approx(1e-5 / LR)
    assert config.optimizer.betas == (0.9, 0.95)


def test_what_norms_and_biases_lose_is_reported_only_where_there_is_decay(tmp_path):
    assert "norms and biases" in left(migrated(tmp_path, {"optimizer.weight_decay": 1e-5}))["optimizer.weight_decay"]
    assert left(migrated(tmp_path)) == {}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"scheduler.t_max": "300ba"}, "scheduler.t_max"),
        ({"scheduler": {"name": "inv_sqrt_with_warmup", "t_warmup": "5ba", "t_scale": "9ba"}}, "scheduler.t_scale"),
        ({"scheduler.name": "polynomial"}, "scheduler.name"),
        ({"optimizer.name": "decoupled_lionw"}, "optimizer.name"),
        ({"algorithms.gradient_clipping.clipping_type": "value"}, "algorithms.gradient_clipping.clipping_type"),
    ],
)
def test_another_curve_or_optimizer_is_left(changes, path, tmp_path):
    assert path in left(migrated(tmp_path, changes))


def test_another_optimizer_gets_no_learning_rate(tmp_path):
    """Lion's rate would be wrong for AdamW."""
    made = migrated(tmp_path, {"optimizer.name": "decoupled_lionw"})
    assert made.sections["optimizer"]["lr"] == "???"
    assert left(made).keys() == {f"optimizer.{key}" for key in ("name", "lr", "betas", "eps", "weight_decay")}
