"""Dropout seeds, throughput arithmetic, and the files that metrics go to."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch

from llmtrain.train.callbacks import throughput
from llmtrain.train.callbacks.step_rng import StepRNG, step_seed
from llmtrain.train.callbacks.throughput import Throughput, TokenCost
from llmtrain.train.loggers import JSONLLogger, read_metrics
from llmtrain.train.report import plot_loss


def state(step: int = 0, tokens: int = 0) -> Any:
    return SimpleNamespace(
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=step), token=SimpleNamespace(value=tokens))
    )


def test_step_seeds_are_all_different_and_fit_a_generator():
    seeds = {step_seed(seed, step, rank) for seed, step, rank in itertools.product(range(3), range(200), range(8))}
    assert len(seeds) == 3 * 200 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)


def test_step_rng_draws_by_step_whatever_came_before():
    def draw(step: int) -> list[float]:
        StepRNG(5).batch_start(state(step), SimpleNamespace())  # type: ignore[arg-type]
        return torch.rand(4).tolist()

    before = torch.get_rng_state()
    first = draw(7)
    torch.rand(100)
    assert draw(7) == first != draw(8)
    torch.set_rng_state(before)


class Collector:
    def __init__(self):
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(throughput.dist, "get_world_size", lambda: 2)
    return now


def run_steps(callback: Throughput, clock, steps: list[tuple[float, int]], between: float = 0.0) -> dict[str, float]:
    """Steps of (seconds, tokens), with `between` seconds of validation after each; what the last one logged."""
    tokens, logged = 0, Collector()
    for number, (seconds, count) in enumerate(steps):
        callback.before_dataloader(state(number, tokens), logged)  # type: ignore[arg-type]
        clock.seconds += seconds
        tokens += count
        callback.batch_end(state(number + 1, tokens), logged)  # type: ignore[arg-type]
        clock.seconds += between
    return logged.metrics


def test_throughput_is_a_mean_over_the_window_without_the_first_step(clock):
    callback = Throughput(TokenCost(foundry=6e9, causal=5e9, hardware=7e9, peak=1e13), window=2)
    logged = run_steps(callback, clock, [(50.0, 1000), (9.0, 1000), (1.0, 1000), (3.0, 3000)], between=100.0)
    assert logged["throughput/step_seconds"] == 3.0
    assert logged["throughput/tokens_per_second"] == 1000.0  # (1000 + 3000) / (1 + 3)
    assert logged["throughput/tokens_per_second_per_device"] == 500.0
    assert logged["throughput/mfu_foundry"] == pytest.approx(500 * 6e9 / 1e13)
    assert logged["throughput/mfu_causal"] == pytest.approx(500 * 5e9 / 1e13)
    assert logged["throughput/hfu"] == pytest.approx(500 * 7e9 / 1e13)


def test_an_unknown_device_has_no_mfu(clock):
    logged = run_steps(Throughput(TokenCost(6e9, 5e9, 7e9, peak=None)), clock, [(1.0, 10), (1.0, 10)])
    assert "throughput/tokens_per_second" in logged
    assert not [name for name in logged if "mfu" in name or "hfu" in name]


def test_one_step_is_too_few_to_tell(clock):
    assert run_steps(Throughput(TokenCost(6e9, 5e9, 7e9, peak=None)), clock, [(1.0, 10)]) == {}


def log(logger: JSONLLogger, step: int, **metrics: float) -> None:
    logger.init(state(), SimpleNamespace())  # type: ignore[arg-type]
    for name, value in metrics.items():  # in pieces, as Composer does
        logger.log_metrics({name: value})
    logger.batch_end(state(step, 10 * step), SimpleNamespace())  # type: ignore[arg-type]


def test_a_step_is_one_line_and_what_is_not_finite_is_left_out(tmp_path):
    logger = JSONLLogger(tmp_path / "run" / "metrics.jsonl", interval=2)
    log(logger, 1, loss=9.0)
    log(logger, 2, loss=0.1 + 0.2, norm=float("nan"))
    log(logger, 4, loss=1.0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 2, "tokens": 20, "loss": 0.1 + 0.2}, {"step": 4, "tokens": 40, "loss": 1.0}]


def test_a_step_that_was_run_again_counts_with_its_last_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, last, value in ((1, 5, 1.0), (3, 6, 2.0)):  # resumed from step 2
        logger = JSONLLogger(path, interval=1)
        for step in range(first, last):
            log(logger, step, loss=value)
    log(JSONLLogger(path, interval=1), 6, other=1.0)
    assert read_metrics(path, "loss") == ([1, 2, 3, 4, 5], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert read_metrics(path, "nothing") == ([], [])


def test_the_loss_curve_is_a_picture_with_something_on_it(tmp_path):
    logger = JSONLLogger(tmp_path / "metrics.jsonl", interval=1)
    for step in range(1, 30):
        log(logger, step, **{"loss/train/total": 5 / step})
    log(logger, 30, **{"metrics/validation/cross_entropy": 1.5})
    picture = plot_loss(tmp_path)
    assert picture is not None and picture == tmp_path / "loss.png"
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    for colour in ("#2171b5", "#d94801"):  # training, smoothed; validation
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels[..., :3] - rgb).max(-1) < 0.02).sum() > 50, colour


def test_no_metrics_no_picture(tmp_path):
    assert plot_loss(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "other": 2}\n')
    assert plot_loss(tmp_path) is None
