"""Evaluation during training: the results of its checkpoint, and unchanged losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.config.report import ConfigError
from llmtrain.eval.report.results import flat_metrics
from llmtrain.eval.runner import evaluate
from llmtrain.schema.config import Config
from tests.support.evaluation import Place
from tests.support.runs import train
from tests.support.tiny import tiny_config, tiny_settings

STEPS = 7
DROPOUT = {"train.duration": f"{STEPS} steps", "model.dropout": 0.1, "model.max_seq_len": 128}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("eval"), documents=3)


def config(shards: Path, run_dir: Path, place: Place, changes: dict[str, Any], **settings: Any) -> Config:
    settings = {"models": [], **settings}
    icl = {"file": str(place.write(settings).rename(run_dir.with_suffix(".yaml"))), "interval": "3 steps"}
    return tiny_config(shards, run_dir, DROPOUT | {"eval.icl": icl} | changes)


def logged(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[int, dict[str, float]] = {}
    for line in lines:
        metrics = {name: value for name, value in line.items() if name.startswith("icl/")}
        found[line["step"]] = found.get(line["step"], {}) | metrics
    return {step: metrics for step, metrics in found.items() if metrics}


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"train.microbatch_size": 8}),
        (2, {"train.microbatch_size": 2, "train.activation_checkpointing": {"type": "full"}}),
        (2, {"train.microbatch_size": 4, "train.sharding": {"strategy": "grad_op"}}),
        pytest.param(1, {"train.microbatch_size": 8, "train.compile": "on"}, marks=pytest.mark.slow),
    ],
    ids=["1 rank", "2 ranks", "2 ranks, grad_op", "compiled"],
)
def test_losses_are_those_of_a_run_without(ranks, shards, tmp_path, place, size, changes):
    made = config(shards, tmp_path / "with", place, changes)
    plain = tiny_config(shards, tmp_path / "without", DROPOUT | changes)
    runs = [ranks(size).run(train, one)[0] for one in (made, plain)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].validation == runs[1].validation
    found = logged(Path(made.run_dir))
    assert list(found) == [3, 6, 7]
    report = evaluate(place.run(models=[made.run_dir], cache=None))
    assert found[7] == pytest.approx(flat_metrics(report.results), abs=1e-5, rel=1e-4)
    assert found[3] != found[6]


@pytest.mark.parametrize("size", [1, 2])
def test_bf16_scores_are_those_of_the_checkpoint_read_in_bf16(ranks, shards, tmp_path, place, size):
    changes = {"train.precision": "amp_bf16", "train.microbatch_size": 4}
    made = config(shards, tmp_path / "run", place, changes)
    ranks(size).run(train, made)
    report = evaluate(place.run(models=[made.run_dir], cache=None, dtype="bfloat16"))
    assert logged(Path(made.run_dir))[7] == pytest.approx(flat_metrics(report.results), abs=1e-5, rel=1e-4)


def test_a_gauntlet_and_a_sparse_log(ranks, shards, tmp_path, place):
    gauntlet = place.folder / "gauntlet.yaml"
    benchmarks = [{"task": "choice.yaml", "shots": 0, "baseline": 0.25}]
    gauntlet.write_text(json.dumps({"name": "g", "categories": {"all": benchmarks}}))
    changes = {"logging.interval": 5, "train.microbatch_size": 2}
    made = config(shards, tmp_path / "run", place, changes, tasks=[], gauntlet=str(gauntlet), limit=3)
    ranks(2).run(train, made)
    found = logged(Path(made.run_dir))
    assert list(found) == [3, 6, 7]
    accuracy = found[7]["icl/choice/acc_sum"]
    assert found[7]["icl/gauntlet/average"] == pytest.approx((accuracy - 0.25) / 0.75)


def test_what_the_model_cannot_read_is_reported_before_training_and_what_is_cut_in_it(ranks, shards, tmp_path, place):
    made = config(shards, tmp_path / "short", place, {"train.microbatch_size": 8}, max_length=2)
    with pytest.raises(Exception, match=r"jsonl:\d+: the model reads 2 tokens, and a continuation of"):
        ranks(1).run(train, made)
    assert not (Path(made.run_dir) / "metrics.jsonl").exists()
    made = config(shards, tmp_path / "cut", place, {"train.microbatch_size": 8}, max_length=24)
    ranks(1).run(train, made)
    assert any(name.endswith("/truncated") and value > 0 for name, value in logged(Path(made.run_dir))[7].items())


def test_a_task_that_is_not_there_is_reported_before_training(shards, tmp_path, place):
    def report(**icl: Any) -> str:
        changes = {"eval.icl": icl}
        file = tmp_path / "run.yaml"
        file.write_text(json.dumps(tiny_settings(shards, tmp_path / "run", DROPOUT | changes)))
        with pytest.raises(ConfigError) as error:
            load_runnable(file)
        return str(error.value)

    eval_yaml = tmp_path / "eval.yaml"
    eval_yaml.write_text(json.dumps({"tasks": ["arc_hard"]}))
    assert "eval.icl.file" in (said := report(file=str(eval_yaml))) and "there is no task 'arc_hard'" in said
    assert "no such file" in report(file=str(tmp_path / "none.yaml"))
    assert "must be positive" in report(file=str(eval_yaml), interval="0 steps")
