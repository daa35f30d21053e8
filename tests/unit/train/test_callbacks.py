"""Dropout seeds, throughput arithmetic, and the files that metrics go to."""

import errno
import itertools
import json
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.flops.peaks import Peak
from llmtrain.schema.wandb import WandbConfig
from llmtrain.train.callbacks import throughput
from llmtrain.train.callbacks.step_rng import StepRNG, step_seed
from llmtrain.train.callbacks.throughput import Throughput, TokenCost
from llmtrain.train.report.loggers import (
    JSONLLogger,
    ProgressLogger,
    StepLogger,
    TensorBoardLogger,
    WandbLogger,
    read_metrics,
)


def state(step: int = 0, tokens: int = 0) -> Any:
    return SimpleNamespace(
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=step), token=SimpleNamespace(value=tokens)),
        max_duration=SimpleNamespace(value=100),
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
        clock.seconds += seconds / 4  # of which the wait for data is a quarter
        callback.after_dataloader(state(number, tokens), logged)  # type: ignore[arg-type]
        clock.seconds += 3 * seconds / 4
        tokens += count
        callback.batch_end(state(number + 1, tokens), logged)  # type: ignore[arg-type]
        clock.seconds += between
    return logged.metrics


def test_throughput_is_a_mean_over_the_window_without_the_first_step(clock):
    callback = Throughput(TokenCost(foundry=6e9, causal=5e9, hardware=7e9, peak=Peak(1e13, "")), window=2)
    logged = run_steps(callback, clock, [(50.0, 1000), (9.0, 1000), (1.0, 1000), (3.0, 3000)], between=100.0)
    assert logged["throughput/step_seconds"] == 3.0
    assert logged["throughput/data_wait_seconds"] == 0.75
    assert logged["throughput/tokens_per_second"] == 1000.0  # (1000 + 3000) / (1 + 3)
    assert logged["throughput/tokens_per_second_per_device"] == 500.0
    assert logged["throughput/mfu_foundry"] == pytest.approx(500 * 6e9 / 1e13)
    assert logged["throughput/mfu_causal"] == pytest.approx(500 * 5e9 / 1e13)
    assert logged["throughput/hfu"] == pytest.approx(500 * 7e9 / 1e13)


def test_a_step_that_records_graphs_does_not_count_once_the_next_is_there(clock):
    cost = TokenCost(foundry=6e9, causal=5e9, hardware=7e9, peak=Peak(1e13, ""))
    logged = run_steps(Throughput(cost), clock, [(50.0, 1000), (9.0, 1000), (3.0, 1000), (1.0, 1000), (1.1, 1000)])
    assert logged["throughput/tokens_per_second"] == pytest.approx(2000 / 2.1)
    assert logged["throughput/seconds_left"] == pytest.approx(95 * 1.05)
    later = [(50.0, 1000), *[(1.0, 1000)] * 5, (9.0, 1000), (1.0, 1000)]
    assert run_steps(Throughput(cost), clock, later)["throughput/tokens_per_second"] == pytest.approx(7000 / 15)


def test_evaluation_and_saves_have_shares_of_the_time_which_what_is_left_contains(clock):
    callback, logged = Throughput(TokenCost(6e9, 5e9, 7e9, peak=Peak(None, ""))), Collector()
    for number in range(5):
        callback.before_dataloader(state(number, 10 * number), logged)  # type: ignore[arg-type]
        callback.after_dataloader(state(number, 10 * number), logged)  # type: ignore[arg-type]
        clock.seconds += 2.0 if number else 70.0
        callback.batch_end(state(number + 1, 10 * number + 10), logged)  # type: ignore[arg-type]
        clock.seconds += 1.5
        callback.batch_checkpoint(state(number + 1), logged)  # type: ignore[arg-type]
        clock.seconds += 0.5
    # After the first step: four steps, evaluations and saves; 95 steps are left, of four seconds with theirs.
    assert logged.metrics["throughput/evaluation_share"] == pytest.approx(6 / 16)
    assert logged.metrics["throughput/save_share"] == pytest.approx(2 / 16)
    assert logged.metrics["throughput/seconds_left"] == pytest.approx(95 * 4)


def test_a_bar_whose_terminal_has_closed_ends_no_run():
    def stop() -> None:
        raise OSError(errno.EIO, "Input/output error")

    progress = ProgressLogger(400, bar=False)
    progress.progress = SimpleNamespace(stop=stop)  # type: ignore[assignment]
    progress.close(None, None)  # type: ignore[arg-type]
    assert progress.progress is None


def test_progress_has_no_time_left_before_a_step_that_does_not_compile(capsys):
    progress = ProgressLogger(400, bar=False, seconds_between_lines=0.0)
    progress.log_metrics({"loss/train/cross_entropy": 8.0})
    progress.batch_end(state(1), SimpleNamespace())  # type: ignore[arg-type]
    progress.log_metrics(
        {"throughput/seconds_left": 125.4, "throughput/evaluation_share": 0.12, "throughput/save_share": 0.0}
    )
    progress.batch_end(state(2), SimpleNamespace())  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines() == [
        "step 1/400  loss 8.0000",
        "step 2/400  loss 8.0000  evaluation 12 % of the time  0:02:05 left",
    ]


def test_an_unknown_device_has_no_mfu(clock):
    logged = run_steps(Throughput(TokenCost(6e9, 5e9, 7e9, peak=Peak(None, ""))), clock, [(1.0, 10), (1.0, 10)])
    assert "throughput/tokens_per_second" in logged
    assert not [name for name in logged if "mfu" in name or "hfu" in name]


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (TokenCost(6e9, 5e9, 22e9, Peak(1e13, "NVIDIA H20")), "HFU of 110.0% is above 100 %"),
        (TokenCost(22e9, 12e9, 16e9, Peak(1e13, "NVIDIA H20")), "Read mfu_causal (60.0%)"),
        (TokenCost(19e9, 12e9, 16e9, Peak(1e13, "NVIDIA H20")), None),
    ],
)
def test_more_than_the_peak_is_reported_once_with_what_may_be_wrong(clock, capsys, cost, said):
    run_steps(Throughput(cost), clock, [(1.0, 1000)] * 5)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == (said is not None)
    assert said is None or said in told[0]
    if said and said.startswith("HFU"):
        assert "10 TFLOP/s (NVIDIA H20) is not the dense peak" in told[0] and "train.peak_tflops" in told[0]


def test_one_step_is_too_few_to_tell(clock):
    assert run_steps(Throughput(TokenCost(6e9, 5e9, 7e9, peak=Peak(None, ""))), clock, [(1.0, 10)]) == {}


def test_an_emptied_metrics_file_is_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    log(JSONLLogger(path, interval=1), 4, loss=1.0)
    assert not caplog.records
    path.write_text("")
    log(JSONLLogger(path, interval=1), 5, loss=1.0)
    assert "metrics.jsonl was empty: what was logged before step 5 is gone" in caplog.text


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


@pytest.mark.parametrize("rare", ["step/gaps", "train/spikes", "train/skipped_steps", "train/rewinds", "icl/arc/acc"])
def test_metrics_of_a_few_steps_are_not_lost_between_two_lines(tmp_path, rare):
    path = tmp_path / "metrics.jsonl"
    logger = JSONLLogger(path, interval=5)
    for step in range(1, 11):
        log(logger, step, loss=float(step), **({rare: 0.5} if step % 3 == 0 else {}))
    assert read_metrics(path, rare) == ([3, 6, 9], [0.5, 0.5, 0.5])
    assert read_metrics(path, "loss")[0] == [3, 5, 6, 9, 10]


def test_a_step_that_was_run_again_counts_with_its_last_value(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for first, last, value in ((1, 5, 1.0), (3, 6, 2.0)):  # resumed from step 2
        logger = JSONLLogger(path, interval=1)
        for step in range(first, last):
            log(logger, step, loss=value)
    log(JSONLLogger(path, interval=1), 6, other=1.0)
    assert read_metrics(path, "loss") == ([1, 2, 3, 4, 5], [1.0, 1.0, 2.0, 2.0, 2.0])
    assert read_metrics(path, "nothing") == ([], [])


def test_a_full_disk_is_reported_once_and_the_file_goes_on_whole(tmp_path, capsys, monkeypatch):
    """RLIMIT_FSIZE stands for the full disk: a write ends in the middle of a line, with an error."""
    path = tmp_path / "metrics.jsonl"
    logger = JSONLLogger(path, interval=1)
    log(logger, 1, loss=1.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for step in (2, 3, 4):
            log(logger, step, loss=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes()[-1:] != b"\n"
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1 and f"{path} cannot be written: OSError" in said and "Training goes on" in said
    for step in (5, 6):
        log(logger, step, loss=3.0)
    assert f"{path} is written again, from step 5; " in capsys.readouterr().out
    assert read_metrics(path, "loss") == ([1, 5, 6], [1.0, 3.0, 3.0])
    assert f"{path}: lines left out, cut short by a full disk or a kill: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "torn",
    ['{"step": 2, "lo', '{"step"', "[1]", "\x00\x00", '{"loss": 1.0}', '{"step": -1e400}', '{"step": 2, "loss": "x"}'],
)
def test_a_run_goes_on_after_a_torn_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": 1.0}}\n{torn}')
    log(JSONLLogger(path, interval=1), 2, loss=2.0)
    assert read_metrics(path, "loss") == ([1, 2], [1.0, 2.0])


def test_no_logger_ends_a_run(tmp_path, capsys):
    class Failing(StepLogger):
        place = "somewhere"
        opened = 0
        works = False

        def open(self) -> None:
            self.opened += 1
            if not self.works:
                raise RuntimeError("no answer")

        def write(self, step: int, metrics: dict[str, float]) -> None:
            self.last = step

        def end(self) -> None:
            raise OSError("full")

    logger = Failing()
    logger.init(state(), SimpleNamespace())  # type: ignore[arg-type]
    for step in (1, 2, 3):
        logger.log_metrics({"loss": 1.0})
        logger.works = step == 3
        logger.batch_end(state(step), SimpleNamespace())  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.count("WARNING: somewhere cannot be written: RuntimeError: no answer") == 1
    assert "somewhere is written again, from step 3" in said and logger.last == 3
    logger.close(state(), SimpleNamespace())  # type: ignore[arg-type]
    assert "OSError: full" in capsys.readouterr().out


def test_a_logger_in_the_background_opens_after_the_first_step_and_writes_all_in_order(monkeypatch):
    done: list[Any] = []

    class Slow(StepLogger):
        place, background = "elsewhere", True

        def open(self) -> None:
            time.sleep(0.05)
            done.append("opened")

        def write(self, step: int, metrics: dict[str, float]) -> None:
            done.append((step, metrics["loss"]))

        def end(self) -> None:
            done.append("ended")

    logger = Slow()
    logger.init(state(), SimpleNamespace())  # type: ignore[arg-type]
    for step in (1, 2):
        logger.log_metrics({"loss": float(step)})
        logger.batch_end(state(step), SimpleNamespace())  # type: ignore[arg-type]
        assert done == []  # no step waits
    logger.close(state(), SimpleNamespace())  # type: ignore[arg-type]
    assert done == ["opened", (1, 1.0), (2, 2.0), "ended"]


def test_a_resumed_run_goes_on_in_its_wandb_run_and_another_folder_begins_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    started = []

    def init(**given):
        started.append(given["id"])
        return SimpleNamespace(id=given["id"] or f"made{len(started)}", define_metric=lambda *_, **__: None)

    peer = SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", peer)
    for folder in ("a", "a", "b"):
        WandbLogger(WandbConfig(project="p"), tmp_path / folder, 1, "run", {}).open()
    assert started == [None, "made1", None]


def test_tables_go_to_wandb_under_their_step(monkeypatch, capsys):
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda columns, data: (columns, data)))
    logger = WandbLogger(WandbConfig(project="p"), Path(), 1, "run", {})
    logger.run = SimpleNamespace(log=logged.append)
    logger.background = False
    logger.log_table(["task"], [["arc"]], "icl/results", 7)
    assert logged == [{"step": 7, "icl/results": (["task"], [["arc"]])}]
    logger.run = None
    logger.log_table(["task"], [["arc"]], "icl/results", 8)
    assert "WARNING: wandb cannot be written" in capsys.readouterr().out


def test_tensorboard_goes_on_in_another_file(tmp_path, monkeypatch, capsys):
    logger = TensorBoardLogger(tmp_path / "tensorboard", interval=1)
    logger.again_seconds, logger.background = 0.0, False
    logger.init(state(), SimpleNamespace())  # type: ignore[arg-type]

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger.writer, "add_scalar", fail)
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0})
        logger.batch_end(state(step), SimpleNamespace())  # type: ignore[arg-type]
    logger.close(state(), SimpleNamespace())  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert said.count("WARNING") == 1 and "No space left" in said and "is written again, from step 2" in said
    assert any(path.stat().st_size > 100 for path in (tmp_path / "tensorboard").iterdir())
