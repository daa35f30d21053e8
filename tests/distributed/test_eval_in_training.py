"""Evaluation during training: the results of its checkpoint, and unchanged losses."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.config.report import ConfigError
from llmtrain.eval.compare.compare import compare
from llmtrain.eval.compare.read import read_sides
from llmtrain.eval.report.results import Report, write_results
from llmtrain.eval.report.tracking import flat_metrics
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
    return tiny_config(shards, run_dir, DROPOUT | {"eval.icl": icl | changes.pop("icl", {})} | changes)


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
        pytest.param(1, {"train.microbatch_size": 8}, marks=pytest.mark.slow),
        (2, {"train.microbatch_size": 2, "train.activation_checkpointing": {"type": "full"}}),
        pytest.param(
            2, {"train.microbatch_size": 4, "train.sharding": {"strategy": "grad_op"}}, marks=pytest.mark.slow
        ),
        pytest.param(1, {"train.microbatch_size": 8, "train.compile": "on"}, marks=pytest.mark.slow),
        pytest.param(2, {"train.microbatch_size": 4, "train.parallel.context": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"train.microbatch_size": 4, "train.parallel.tensor": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"train.microbatch_size": 4, "train.parallel.tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            4,
            {
                "train.microbatch_size": 2,
                "train.parallel": {"pipeline": 2, "virtual_stages": 2},
                "model.layers": "m (s+m)*3",
                "eval.prompt": "a",
                "eval.samples": {"prompts": ["b"]},
            },
            marks=pytest.mark.ci,
        ),
    ],
    ids=[
        *("1 rank", "2 ranks", "2 ranks, grad_op", "compiled", "2 ranks that share sequences"),
        *("2 ranks that share layers", "two groups of them", "two pipelines"),
    ],
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
    assert "icl/choice-0-shot/acc_sum_stderr" in found[7]
    assert_kept(Path(made.run_dir) / "icl", report, tmp_path / "again")


def assert_kept(kept: Path, report: Report, again: Path) -> None:
    """Check the folders of results of a run, and that the last has the documents and answers of its checkpoint."""
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000003", "step-00000006", "step-00000007"]
    write_results(report, again, settings={}, picture=False)
    same = compare(*read_sides(kept / "step-00000007", again, None, None))
    assert len(same.tasks) == len(report.results)
    assert [one.headline.value for one in same.tasks] == pytest.approx([0.0] * len(same.tasks), abs=0.1)
    earlier = compare(*read_sides(kept / "step-00000003", kept / "step-00000007", None, None))
    assert earlier.a.endswith("/step-00000003") and any(one.headline.value for one in earlier.tasks)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
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
    changes = {"logging.interval": 5, "train.microbatch_size": 2, "icl": {"keep_answers": 1}}
    made = config(shards, tmp_path / "run", place, changes, tasks=[], gauntlet=str(gauntlet), limit=3)
    ranks(2).run(train, made)
    found = logged(Path(made.run_dir))
    assert list(found) == [3, 6, 7]
    accuracy = found[7]["icl/choice/acc_sum"]
    assert found[7]["icl/gauntlet/average"] == pytest.approx((accuracy - 0.25) / 0.75)
    kept = {path.parent.name: path for path in Path(made.run_dir).glob("icl/*/results.json")}
    assert sorted(kept) == ["step-00000003", "step-00000006", "step-00000007"]
    assert [name for name in sorted(kept) if (kept[name].parent / "documents").is_dir()] == ["step-00000007"]
    [scores] = [one for one in json.loads(kept["step-00000007"].read_text())["gauntlet"].values() if one != "g"]
    assert scores["averages"]["average"]["value"] == found[7]["icl/gauntlet/average"]
    assert found[7]["icl/gauntlet/average_stderr"] == scores["averages"]["average"]["stderr"]


def test_what_the_model_cannot_read_is_reported_before_training_and_what_is_cut_in_it(ranks, shards, tmp_path, place):
    cannot = {"max_length": 2, "tasks": [place.tasks[0]]}
    made = config(shards, tmp_path / "short", place, {"train.microbatch_size": 8}, **cannot)
    with pytest.raises(Exception, match=r"jsonl:\d+: the model reads 2 tokens, and a continuation of"):
        ranks(1).run(train, made)
    assert not (Path(made.run_dir) / "metrics.jsonl").exists()
    made = config(shards, tmp_path / "cut", place, {"train.microbatch_size": 8}, max_length=24)
    ranks(1).run(train, made)
    assert any(name.endswith("/truncated") and value > 0 for name, value in logged(Path(made.run_dir))[7].items())


def test_a_task_that_cannot_be_evaluated_does_not_end_the_run(ranks, shards, tmp_path, place):
    """Of three tasks, one has no file, and one asks for more examples than there are; neither has the gauntlet its benchmark."""
    lost = place.folder / "lost.yaml"
    lost.write_text(json.dumps({"name": "lost", "type": "language_modeling", "source": {"path": "nowhere.jsonl"}}))
    gauntlet = place.folder / "lost_gauntlet.yaml"
    gauntlet.write_text(
        json.dumps({"name": "g", "categories": {"all": [{"task": "lost.yaml", "shots": 0, "baseline": 0.5}]}})
    )
    tasks = [str(lost), {"task": place.tasks[0], "shots": [0, 50]}]
    made = config(shards, tmp_path / "run", place, {"train.microbatch_size": 4}, tasks=tasks, gauntlet=str(gauntlet))
    ranks(2).run(train, made)
    found = logged(Path(made.run_dir))
    assert list(found) == [3, 6, 7]
    assert {name.partition("/")[2].partition("/")[0] for name in found[7]} == {"choice-0-shot"}
    content = json.loads((Path(made.run_dir) / "icl/step-00000007/results.json").read_text())
    assert [(one["task"], one["shots"]) for one in content["results"]] == [("choice", 0)]
    reasons = {one["title"]: one["reason"] for one in content["failed"]}
    assert list(reasons) == ["lost (0-shot)", "choice (50-shot)", "gauntlet g"]
    assert "nowhere.jsonl" in reasons["lost (0-shot)"] and "50" in reasons["choice (50-shot)"]
    assert {model for one in content["failed"] for model in one["models"]} == {f"{made.name}/step-00000007"}


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
