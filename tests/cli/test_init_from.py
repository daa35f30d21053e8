"""`init_from`: a run that starts from weights, and what it says to weights that do not fit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.cli import main
from llmtrain.generate.load import load_model
from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.report.loggers import read_metrics
from tests.support import runs
from tests.support.checkpoints import edit_manifest
from tests.support.conversion import publish
from tests.support.project import Project, copy_of
from tests.support.tiny import tiny_config


class FirstBatch(LoggerDestination):
    """What the model sees in the first step."""

    batch: Any = None

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.batch is None:
            self.batch = {name: state.batch[name].clone() for name in ("input_ids", "labels")}


def train(config: Config) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
    """A job: trains; this rank's first batch, and the losses by step."""
    first = FirstBatch()
    with runs.observed_by(first):
        run.train(config)
    dist.barrier()  # rank 0 has written its last line
    return first.batch, metric(config.run_dir, "loss/train/total")


def metric(run_dir: str | Path, name: str) -> dict[int, float]:
    return dict(zip(*read_metrics(Path(run_dir) / "metrics.jsonl", name), strict=True))


def loss_of(weights: Path, batches: list[dict[str, torch.Tensor]]) -> float:
    model, _ = load_model(str(weights), torch.float32)
    with torch.no_grad():
        ids, labels = (
            torch.cat([batch[name] for batch in batches]).to(model.device) for name in ("input_ids", "labels")
        )
        return float(model.loss(ids, labels).loss)


@pytest.fixture
def imported(tmp_path) -> Path:
    publish(tmp_path / "published", "zamba2")
    assert main(["import", str(tmp_path / "published"), str(tmp_path / "weights")]) == 0
    return tmp_path / "weights"


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_training_goes_on_from_imported_weights(ranks, imported, shards, tmp_path, size):
    model = yaml.safe_load((imported / "model.yaml").read_text())["model"]
    assert model["vocab_size"] == 300
    changes = {"model": model, "init_from": str(imported), "train.duration": "3 steps", "schedule.warmup": "0 steps"}
    config = tiny_config(shards, tmp_path / "run", changes)
    answers = ranks(size).run(train, config)
    losses = answers[0][1]
    assert losses[1] == pytest.approx(loss_of(imported, [batch for batch, _ in answers]), abs=2e-5)
    assert losses[3] < losses[1]
    # The run's own checkpoint is read from now on: the weights may go.
    shutil.rmtree(imported)
    [(_, losses), *_] = ranks(size).run(
        train, tiny_config(shards, tmp_path / "run", changes | {"train.duration": "4 steps"})
    )
    assert list(losses) == [1, 2, 3, 4]


def test_another_runs_weights_with_its_own_optimizer_and_schedule(ranks, finished, tmp_path):
    before, _ = finished
    changes = {
        "init_from": str(before.run_dir),
        "train.duration": "2 steps",
        "seed": 99,
        "model.dropout": 0.1,
        "model.init": {"std": 0.5},
        "model.blocks.m.dt_min": 0.01,
        "model.blocks.m.chunk_size": 8,
        "model.max_seq_len": 64,
        "optimizer.lr": 1e-30,
        "schedule.warmup": "0 steps",
        "eval.interval": "2 steps",
    }
    config = tiny_config(before.shards, tmp_path / "run", changes)
    [run] = ranks(1).run(runs.train, config)
    [(_, expected)] = runs._metric(
        tiny_config(before.shards, before.run_dir), "metrics/validation/cross_entropy"
    ).items()
    assert run.validation[2] == pytest.approx(expected, abs=1e-5)


def check(project: Project, capsys, monkeypatch, *arguments: str, command: str = "check") -> tuple[int, str]:
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr("llmtrain.train.worker._train", None)
    status = main([command, "run.yaml", *arguments])
    captured = capsys.readouterr()
    return status, captured.err


@pytest.mark.parametrize("command", ["check", "train"])
def test_another_model_is_refused_setting_by_setting(finished, project, capsys, monkeypatch, command):
    source = str(finished[0].run_dir)
    project.write({"init_from": source, "model.d_model": 64, "model.blocks.m.d_state": 16, "model.dropout": 0.1})
    status, text = check(project, capsys, monkeypatch, command=command)
    assert status == 2
    title, *rows = text.splitlines()
    assert title == "run.yaml: 2 errors"
    assert [row.split()[0] for row in rows] == ["model.d_model", "model.blocks.m.d_state"]
    assert f"64: must be 32, as in the checkpoint of init_from ({source})" in rows[0]
    assert not project.run_dir.exists()


def test_learned_positions_must_have_the_length(tmp_path, shards, finished):
    from llmtrain.checkpoint.initial_weights import initial_problems

    changes = {"init_from": str(finished[0].run_dir), "model.max_seq_len": 64, "model.positions": "learned"}
    config = tiny_config(shards, tmp_path / "run", changes)
    assert [problem.path for problem in initial_problems(config, False)] == ["model.max_seq_len", "model.positions"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.mkdir(), "holds no checkpoint"),
        (lambda path: publish(path, "mpt"), "`llmtrain import"),
    ],
    ids=["absent", "empty", "published"],
)
def test_weights_that_are_not_there_are_reported(make, message, project, tmp_path, capsys, monkeypatch):
    make(tmp_path / "weights")
    project.write({"init_from": "weights"})
    status, text = check(project, capsys, monkeypatch)
    assert status == 2
    [line] = [row for row in text.splitlines() if row.startswith("  init_from  ")]
    assert message in line


def test_a_run_that_is_under_way_takes_no_other_weights(finished, tmp_path, capsys, monkeypatch):
    project = copy_of(finished, tmp_path)
    status, text = check(project, capsys, monkeypatch, f"init_from={finished[0].run_dir}", command="train")
    assert status == 2
    assert f"  init_from: null -> {finished[0].run_dir}" in text and "--fresh" in text


def test_fresh_asks_for_the_weights_again(finished, tmp_path, capsys, monkeypatch):
    project = copy_of(finished, tmp_path)
    folder = project.run_dir / "checkpoints" / "step-00000006"
    edit_manifest(folder, config=manifests.read(folder).config | {"init_from": "gone"})
    assert check(project, capsys, monkeypatch, "init_from=gone")[0] == 0  # not read any more
    status, text = check(project, capsys, monkeypatch, "--fresh", "init_from=gone", command="train")
    assert status == 2 and "gone: no such folder" in text
    assert project.run_dir.exists()


def test_a_run_does_not_start_from_itself(finished, tmp_path, capsys, monkeypatch):
    project = copy_of(finished, tmp_path)
    status, text = check(project, capsys, monkeypatch, "--fresh", "init_from=run", command="train")
    assert status == 2 and "is the folder of this run" in text
