"""`train.profile`: a trace and a table of some steps, by every rank together, that change nothing of the training."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from llmtrain.distributed.world import world_from_environment
from llmtrain.logs import copied_to
from llmtrain.schema.config import Config
from llmtrain.train.report.step_profile import PARTS
from tests.support import runs
from tests.support.tiny import tiny_config

SETTINGS = {"train.duration": "6 steps", "train.microbatch_size": 1}


def config_of(shards: Path, folder: Path, **profile: object) -> Config:
    return tiny_config(shards, folder, SETTINGS | ({"train.profile": profile} if profile else {}))


def train(config: Config) -> runs.Run:
    """A job: trains, with a copy of what the run says."""
    with copied_to(Path(config.run_dir) / "logs" / "rank0.txt") if world_from_environment().is_main else nullcontext():
        return runs.train(config)


@pytest.mark.ci
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_trace_and_the_parts_of_a_step(ranks, shards, tmp_path, size):
    plain = ranks(size).run(train, config_of(shards, tmp_path / "plain"))[0]
    profiled = ranks(size).run(train, config_of(shards, tmp_path / "run", after=2, steps=2))[0]
    assert profiled.losses == plain.losses

    [folder] = (tmp_path / "run" / "profile").iterdir()
    assert folder.name == "step-00000004"
    found = json.loads((folder / "breakdown.json").read_text())
    assert len(found) == size
    for rank in found:
        assert rank["steps"] == 2 and tuple(rank["parts"]) == PARTS
        assert sum(rank["parts"].values()) == pytest.approx(rank["seconds"])
        assert rank["parts"]["products"] > 0 and rank["parts"]["optimizer"] > 0

    traces = sorted(folder.glob("rank*.trace.json.gz"))
    assert traces[0].name == "rank0.trace.json.gz"
    with gzip.open(traces[0]) as trace:
        names = [event.get("name", "") for event in json.load(trace)["traceEvents"]]
    assert names.count("llmtrain.step") == 2 and any(name == "aten::mm" for name in names)
    [said] = [line for line in log_of(tmp_path / "run") if "profile of 2 steps" in line]
    assert str(folder) in said


@pytest.mark.ci
def test_shares_of_a_steps_time_are_metrics_of_one_step_in_so_many(ranks, shards, tmp_path):
    steps = {"train.duration": "8 steps"}
    plain = ranks(2).run(train, tiny_config(shards, tmp_path / "plain", SETTINGS | steps))[0]
    made = tiny_config(shards, tmp_path / "run", SETTINGS | steps | {"logging.step_times": 3})
    assert ranks(2).run(train, made)[0].losses == plain.losses
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = {line["step"]: {k: v for k, v in line.items() if k.startswith("step/")} for line in lines}
    [(step, found)] = [(step, found) for step, found in shares.items() if found]
    assert step == 6  # not 3, when the run has just begun
    assert found.pop("step/slowest_rank") in (0, 1) and found.pop("step/lag_seconds") >= 0
    assert set(found) == {"step/gpu_busy", "step/communication", "step/data_wait", "step/gaps"}
    assert sum(found.values()) == pytest.approx(1) and found["step/gpu_busy"] > 0


def test_a_run_too_short_for_its_profile_reports_it(ranks, shards, tmp_path):
    """Resumed, it has fewer steps left."""
    ranks(1).run(train, tiny_config(shards, tmp_path / "run", SETTINGS | {"train.duration": "4 steps"}))
    config = config_of(shards, tmp_path / "run", after=2, steps=4)
    assert len(ranks(1).run(train, config)[0].losses) == 6
    assert any("no profile: the run made 2 steps" in line for line in log_of(tmp_path / "run"))


def log_of(folder: Path) -> list[str]:
    return (folder / "logs" / "rank0.txt").read_text().splitlines()
