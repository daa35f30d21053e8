"""train.spike.action: rewind. A spike brings back the last checkpoint, and the data that led to it is passed over."""

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.save_load import RunState
from llmtrain.cli import main
from llmtrain.errors import RunError
from llmtrain.logs import run_log
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.faults.rewind import Rewind
from llmtrain.train.report.loggers import read_metrics
from tests.support.runs import Interrupted, observed_by, read_tensors, train
from tests.support.tiny import STEPS_PER_EPOCH, tiny_config

LAST = "checkpoints/step-{:08d}"
GUARDED: dict[str, Any] = {
    "train.duration": "12 steps",
    "eval.interval": "12 steps",
    "checkpoint.interval": "4 steps",
    "train.spike": {"window": 6, "deviations": 6.0, "action": "rewind"},
    "train.ema": {"decay": 0.8},
}


class Order(LoggerDestination):
    """(step, sample ids over all ranks) of every step as it begins, those that are repeated too."""

    def __init__(self, stop_at: int | None):
        self.stop_at, self.seen = stop_at, list[tuple[int, list[int]]]()

    def batch_start(self, state: State, logger: Logger) -> None:
        if len(self.seen) == self.stop_at:
            raise Interrupted
        ids = dist.all_gather_object(state.batch["sample_ids"].tolist())
        self.seen.append((state.timestamp.batch.value + 1, sorted(id for rank in ids for id in rank)))


def train_with(config: Config, bad: list[int], stop_at: int | None = None) -> tuple[list[Any], list[str], str]:
    """A job: what Order saw, warnings, and the error. The loss of a batch with one of the `bad` samples is four times as high."""
    order, true_loss, warnings = Order(stop_at), NextToken.loss, list[str]()

    def loss(self, outputs, batch):
        found = true_loss(self, outputs, batch)
        if set(batch["sample_ids"].tolist()) & set(bad):
            found.loss = found.loss * 4
        return found

    error = ""
    with (
        observed_by(order),
        patch.object(NextToken, "loss", loss),
        patch.object(run_log, "warning", warnings.append),
        contextlib.suppress(Interrupted),
    ):
        try:
            run.train(config)
        except RunError as caught:
            error = f"{type(caught).__name__}: {caught}"
    return order.seen, warnings, error


@pytest.fixture(scope="module")
def samples(ranks, shards, tmp_path_factory) -> dict[int, list[int]]:
    """Samples of each step of an undisturbed run."""
    config = tiny_config(shards, tmp_path_factory.mktemp("plain") / "run", {"train.duration": "40 steps"})
    [found] = ranks(1).run(train, config)
    return found.samples


def steps(*pieces: range) -> list[int]:
    return [step for piece in pieces for step in piece]


def read(samples: dict[int, list[int]], order: list[Any]) -> list[tuple[int, int]]:
    """(step, step of the undisturbed run that read the same) of every step of a run."""
    place = {tuple(ids): step for step, ids in samples.items()}
    return [(step, place[tuple(ids)]) for step, ids in order]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_the_run_goes_on_from_the_checkpoint_with_the_data_behind_the_spike(ranks, shards, tmp_path, samples, size):
    config = tiny_config(shards, tmp_path / "run", GUARDED)
    for order, warnings, error in ranks(size).run(train_with, config, samples[7][:1]):
        assert error == ""
        assert read(samples, order) == [(s, s) for s in range(1, 8)] + [(s, s + 3) for s in range(5, 13)]
        assert "skipped: the loss" in warnings[0] and "at step 7;" in warnings[0]
        assert "went back from step 7 to" in warnings[1] and "step-00000004 (rewind 1 of 3)" in warnings[1]
        assert "the samples of the steps from 5 to 7 are passed over" in warnings[1]
    # The same as a run that continues from that checkpoint with the spike's data left out.
    manifest = manifests.read(tmp_path / "run" / LAST.format(12))
    assert manifest.data["passed_over"] == [[4, 3]]
    assert manifest.clock["batch"] == 12 and manifest.data["position"]["sample_in_epoch"] == 15 * 8
    assert manifest.tokens == 12 * 8 * 32
    recorded, rewinds = read_metrics(tmp_path / "run" / "metrics.jsonl", "train/rewinds")
    assert recorded[-1:] == [5] and rewinds[-1:] == [1.0]


def test_weights_moments_and_averages_are_those_of_the_checkpoint(ranks, shards, tmp_path, samples):
    """A spike in the step after the one that was saved: what is trained next begins where the checkpoint was."""
    changes = GUARDED | {"checkpoint.interval": "1 steps", "train.duration": "6 steps", "checkpoint.keep_last": None}
    config = tiny_config(shards, tmp_path / "run", changes)
    [(order, _, error)] = ranks(1).run(_train_and_save_after_rewinds, config, samples[5][:1])
    assert error == "" and read(samples, order)[4:6] == [(5, 5), (5, 6)]
    before, after = (read_tensors(tmp_path / "run" / LAST.format(step)) for step in (4, 99))
    assert any(name.startswith("ema.") for name in before) and any(".exp_avg" in name for name in before)
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[name]), name


def _train_and_save_after_rewinds(config: Config, bad: list[int]) -> tuple[list[Any], list[str], str]:
    """train_with, where a rewind is followed by a save, as step 99."""
    true_perform = Rewind.perform

    def perform(self, state):
        if not true_perform(self, state):
            return False
        self.saver.save(RunState(99, 0, {}, {}, {}))
        self.saver.wait()
        return True

    with patch.object(Rewind, "perform", perform):
        return train_with(config, bad)


@pytest.mark.ci
@pytest.mark.parametrize(("first", "then", "stop_at"), [(1, 1, 9), (1, 1, 13), (1, 2, 13), (2, 1, 9)])
def test_a_run_that_is_interrupted_after_a_rewind_ends_as_the_other(
    ranks, shards, tmp_path, samples, first, then, stop_at
):
    """Before its next checkpoint, and after it."""
    whole, parts = (tiny_config(shards, tmp_path / name, GUARDED) for name in ("whole", "parts"))
    bad = samples[7][:1]
    ranks(1).run(train_with, whole, bad)
    ranks(first).run(train_with, parts, bad, stop_at)
    [(order, _, error), *_] = ranks(then).run(train_with, parts, bad)
    assert error == ""
    assert read(samples, order)[-1] == (12, 15)
    expected, found = (read_tensors(tmp_path / name / LAST.format(12)) for name in ("whole", "parts"))
    relative = 0 if first == then == 1 else 1e-3
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=relative, atol=relative / 10, msg=name)
    assert manifests.read(tmp_path / "parts" / LAST.format(12)).data["passed_over"] == [[4, 3]]


def test_a_rewind_over_the_end_of_an_epoch(ranks, shards, tmp_path, samples):
    """The checkpoint is of the epoch before the spike's. What comes behind is read as ever, after a resume on other ranks too."""
    end = STEPS_PER_EPOCH
    changes = GUARDED | {"train.duration": f"{end + 8} steps", "checkpoint.interval": f"{end - 2} steps"}
    config = tiny_config(shards, tmp_path / "run", changes)
    bad = samples[end + 2][:1]
    # The same sample again in an epoch to come would be another spike.
    [(order, _, error)] = ranks(1).run(train_with, config, bad)
    assert error == ""
    expected = [(s, s) for s in range(1, end + 3)] + [(s, s + 4) for s in range(end - 1, end + 9)]
    assert read(samples, order) == expected
    longer = changes | {"train.duration": f"{end + 12} steps"}
    [(order, _, error), _] = ranks(2).run(train_with, tiny_config(shards, tmp_path / "run", longer), [])
    assert error == "" and read(samples, order) == [(s, s + 4) for s in range(end + 9, end + 13)]


def test_spikes_before_the_first_checkpoint_are_skipped(ranks, shards, tmp_path, samples):
    config = tiny_config(shards, tmp_path / "run", GUARDED | {"checkpoint.interval": "8 steps"})
    [(order, warnings, error)] = ranks(1).run(train_with, config, samples[6][:1])
    assert error == "" and [step for step, _ in order] == list(range(1, 13))
    assert warnings[1] == "no checkpoint to go back to: step 6 was skipped"


def test_a_run_gives_up_after_so_many_rewinds_to_one_checkpoint(ranks, shards, tmp_path, samples):
    spike = GUARDED["train.spike"] | {"max_rewinds": 2}
    config = tiny_config(shards, tmp_path / "run", GUARDED | {"train.spike": spike})
    bad = [samples[step][0] for step in (6, 7, 9, 10)]
    for order, _, error in ranks(2).run(train_with, config, bad):
        assert error == (
            "SpikeError: a spike at step 6 after the run went back to step 4 2 times (train.spike.max_rewinds)"
        )
        assert read(samples, order) == [(s, s) for s in range(1, 7)] + [(5, 7), (5, 8), (6, 9)]


def test_rewinds_after_a_new_checkpoint_are_counted_anew(ranks, shards, tmp_path, samples):
    spike = GUARDED["train.spike"] | {"max_rewinds": 1}
    config = tiny_config(shards, tmp_path / "run", GUARDED | {"train.spike": spike})
    [(order, _, error)] = ranks(1).run(train_with, config, [samples[6][0], samples[12][0]])
    assert error == ""
    assert read(samples, order)[-1] == (12, 16)
    assert manifests.read(tmp_path / "run" / LAST.format(12)).data["passed_over"] == [[4, 2], [8, 2]]


def test_the_samples_of_such_a_run_are_reported(ranks, shards, tmp_path, samples, capsys):
    config = tiny_config(shards, tmp_path / "run", GUARDED)
    [(order, *_)] = ranks(1).run(train_with, config, samples[7][:1])
    assert main(["data", "seen", str(tmp_path / "run"), "--steps", "3:9", "--json"]) == 0
    told: dict[int, list[int]] = {}
    for line in capsys.readouterr().out.splitlines():
        one = json.loads(line)
        told.setdefault(one["step"], []).append(one["sample"])
    final = dict(order)  # of a step that was repeated, the last
    assert {step: sorted(ids) for step, ids in told.items()} == {step: final[step] for step in range(3, 10)}
    assert main(["checkpoint", "show", str(tmp_path / "run")]) == 0
    assert "3 steps' worth passed over after step 4" in capsys.readouterr().out


def test_action_may_change_when_a_run_is_resumed(ranks, shards, tmp_path, samples):
    """And what was passed over stays on record."""
    folder = tmp_path / "run"
    ranks(1).run(train_with, tiny_config(shards, folder, GUARDED), samples[7][:1])
    skipping = GUARDED | {"train.spike": GUARDED["train.spike"] | {"action": "skip"}, "train.duration": "14 steps"}
    [(order, _, error)] = ranks(1).run(train_with, tiny_config(shards, folder, skipping), [])
    assert error == "" and read(samples, order) == [(13, 16), (14, 17)]
    assert manifests.read(Path(folder, LAST.format(14))).data["passed_over"] == [[4, 3]]
