"""RUN/loss.png and its smoothed curve."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

from llmtrain.train.report import picture
from llmtrain.train.report.curves import Curve, read_curves, smooth, stream_metrics
from llmtrain.train.report.picture import LossPicture, plot_loss

TRAINING, VALIDATION = "loss/train/cross_entropy", "metrics/validation/cross_entropy"


def falling(steps: np.ndarray) -> np.ndarray:
    """A loss without noise, as steep as that of a small model."""
    return 2 + 9 * (1 + steps / 3) ** -0.6


def log(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("count", [1, 2, 3, 30, 300])
def test_the_smoothed_curve_does_not_lag(count):
    steps = np.arange(1, count + 1)
    off = smooth(steps, falling(steps)) - falling(steps)
    assert np.abs(off).max() < 0.1 and abs(off.mean()) < 0.03  # a moving average of 30 steps is 0.4 above, and more


def test_the_smoothed_curve_has_less_noise_and_no_bias():
    steps = np.arange(1, 2001)
    noise = np.random.default_rng(0).normal(0, 0.1, 2000)
    off = (smooth(steps, falling(steps) + noise) - falling(steps))[100:]
    assert np.std(off) < 0.02 and off.mean() == pytest.approx(noise[100:].mean(), abs=0.001)


def test_a_line_is_its_own_smoothed_curve_with_gaps_too():
    steps = np.array([1, 2, 5, 9, 10, 40, 41, 100])
    assert smooth(steps, 7 - 0.01 * steps) == pytest.approx(7 - 0.01 * steps)


def test_steps_that_a_resumed_run_repeats_are_drawn_once_and_abandoned_ones_never():
    curve = Curve()
    for step, value in [(1, 5.0), (2, 4.0), (3, 3.0), (4, 9.0), (2, 4.5), (3, 3.5)]:
        curve.add(step, value)
    steps, values = curve.copy()
    assert steps.tolist() == [1, 2, 3] and values.tolist() == [5.0, 4.5, 3.5]


def test_streams_by_the_names_of_their_metrics():
    names = [VALIDATION, "metrics/validation/bits_per_byte", "metrics/validation/a/b/cross_entropy", TRAINING]
    names += ["metrics/validation/cross_entropy/cross_entropy", "metrics/validation/a/bits_per_byte"]
    assert [name for name, _ in stream_metrics(names)] == ["a/b", "cross_entropy"]


@pytest.fixture
def plotted(monkeypatch) -> dict[str, tuple[list[float], list[float]]]:
    """Curves by their labels, as they are drawn from here on."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    plot = Axes.plot

    def spy(self, x, y, *args, label, **options):
        found[label] = np.asarray(x).tolist(), np.asarray(y).tolist()
        return plot(self, x, y, *args, label=label, **options)

    monkeypatch.setattr(Axes, "plot", spy)
    return found


def test_the_picture_has_a_curve_of_everything(tmp_path):
    log(tmp_path, [{"step": step, TRAINING: 5 / step} for step in range(1, 30)] + [{"step": 30, VALIDATION: 1.5}])
    drawn = plot_loss(tmp_path)
    assert drawn is not None and drawn == tmp_path / "loss.png"
    assert [path.name for path in tmp_path.glob("*png*")] == ["loss.png"]
    pixels = matplotlib.image.imread(drawn)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 600
    for colour in ("#2171b5", "#d94801"):  # training, smoothed; validation
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels[..., :3] - rgb).max(-1) < 0.02).sum() > 50, colour


def test_cross_entropy_is_drawn_without_the_z_loss_and_every_stream(tmp_path, plotted):
    log(
        tmp_path / "$run$",
        [
            {"step": 1, TRAINING: 5.0, "loss/train/z": 1.0, "loss/train/total": 6.0},
            {"step": 3, TRAINING: 3.0, "loss/train/z": 1.0, "loss/train/total": 4.0},  # step 2 was not finite
            {"step": 3, VALIDATION: 3.5, "metrics/validation/$x$ {/cross_entropy": 3.0, f"{VALIDATION}x": 9},
        ],
    )
    assert plot_loss(tmp_path / "$run$") is not None
    assert plotted["training, each step"] == ([1, 3], [5, 3])
    assert plotted["validation, all streams"] == ([3], [3.5])
    assert plotted[r"validation, \$x\$ {"] == ([3], [3.0])
    assert len(plotted) == 4


def test_a_long_run_is_drawn_with_as_many_points_as_the_picture_has(tmp_path, plotted):
    steps = np.arange(1, 100_001)
    picture.draw({TRAINING: (steps, falling(steps))}, tmp_path)
    [(x, y)] = plotted.values()
    assert len(x) <= 2000 and x[0] < 50 and x[-1] > 99_950
    assert y[1000] == pytest.approx(falling(np.array(x[1000])), abs=0.01)


def test_a_run_of_preferences_has_its_loss_margins_and_accuracies(tmp_path, plotted):
    loss, margin, accuracy = "loss/train/total", "rewards/margins", "rewards/accuracies"
    log(
        tmp_path,
        [
            {"step": 1, loss: 0.7, "loss/train/sigmoid": 0.7, margin: 0.0, accuracy: 0.5},
            {"step": 2, loss: 0.5, "loss/train/sigmoid": 0.5, margin: 1.0, accuracy: 1.0},
            {"step": 2, "metrics/validation/preference_loss": 0.6, "metrics/validation/accuracy": 0.75},
        ],
    )
    assert plot_loss(tmp_path) is not None
    shown = {"training, each step": [0.7, 0.5], "validation": [0.6], margin: [0, 1], accuracy: [0.5, 1]}
    assert {label: plotted[label][1] for label in shown} == shown


def test_no_metrics_no_picture(tmp_path):
    assert plot_loss(tmp_path) is None
    log(tmp_path, [{"step": 1, "other": 2}])
    assert plot_loss(tmp_path) is None


def state(step: int) -> Any:
    value = SimpleNamespace(value=step)
    return SimpleNamespace(timestamp=SimpleNamespace(batch=value, token=value))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(picture, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def take(logger: LossPicture, step: int) -> None:
    """A step; then waits for the picture, if one was begun."""
    logger.log_metrics({TRAINING: 5 / step})
    logger.batch_end(state(step), SimpleNamespace())  # type: ignore[arg-type]
    if logger.thread:
        logger.thread.join()


def test_the_picture_is_redrawn_while_the_run_trains(tmp_path, clock, monkeypatch):
    drawn: list[tuple[list[int], bool]] = []

    def draw(curves, folder) -> None:
        drawn.append((curves[TRAINING][0].tolist(), threading.current_thread() is threading.main_thread()))
        clock.seconds += 2  # seconds, on a busy machine

    monkeypatch.setattr(picture, "draw", draw)
    log(tmp_path, [{"step": step, TRAINING: 9.0} for step in (1, 2, 3)])  # an earlier session, resumed from step 2
    logger = LossPicture(tmp_path, interval=1, first=10, between=60)
    logger.init(state(0), SimpleNamespace())  # type: ignore[arg-type]
    for seconds, step in ((5, 3), (10, 4), (100, 5), (400, 6), (411, 7)):
        clock.seconds = seconds
        take(logger, step)
    # Not before 10 s; then, as a picture takes 2 s, 400 s after it.
    assert drawn == [([1, 2, 3, 4], False)]
    clock.seconds = 500
    take(logger, 8)
    assert drawn[1:] == [([1, 2, 3, 4, 5, 6, 7, 8], False)]
    take(logger, 9)
    logger.close(state(9), SimpleNamespace())  # type: ignore[arg-type]
    assert drawn[2:] == [([1, 2, 3, 4, 5, 6, 7, 8, 9], True)]


def test_a_picture_that_fails_is_reported_once_and_ends_nothing(tmp_path, clock, capsys):
    logger = LossPicture(tmp_path / "gone", interval=1, first=0, between=0)
    for step in (1, 2):
        take(logger, step)
    logger.close(state(2), SimpleNamespace())  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("loss.png was not drawn: OutputError: cannot write") == 1


def test_curves_of_a_file_with_lines_that_are_none(tmp_path):
    (tmp_path / "m").write_bytes(b'{"step": 1, "a": 2}\n\xff\xfe\n[]\n{"a": 1}\n{"step": 2, "a": 3, "b": 1}\n{"step"')
    assert {name: curve.copy()[1].tolist() for name, curve in read_curves(tmp_path / "m", "a".__eq__).items()} == {
        "a": [2.0, 3.0]
    }
