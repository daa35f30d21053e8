"""`init_from` with a part of a checkpoint: what is taken, what starts fresh, and what is said of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llmtrain.checkpoint.partial_load import load_part
from llmtrain.checkpoint.repository import Repository
from llmtrain.distributed.world import world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train.optim import build_optimizer
from llmtrain.train.parallel import parallelize
from tests.cli.test_init_from import check
from tests.support import checkpoints, runs
from tests.support.ranks import RankFailed
from tests.support.runs import read_tensors
from tests.support.tiny import tiny_config


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def start(config: Config) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], str]:
    """A job: parameters that were all 7 before, optimizer states, and what was said."""
    with torch.device("meta"):
        model = HybridLM(config.model)
    parallelize(CausalLM(model), config.train, world_from_environment(), torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(7)
    optimizer = build_optimizer(model, config.optimizer)
    assert config.init_from is not None
    loaded = load_part(*Repository(config.init_from.path).open(), model, optimizer, config.init_from, verify=True)
    parameters = dict(model.named_parameters())
    states = {
        name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    rates = {group["lr"] for group in optimizer.param_groups}
    assert rates == {config.optimizer.lr}
    dist.barrier()
    return {name: whole(parameter) for name, parameter in parameters.items()}, states, loaded.summary()


@pytest.fixture
def saved(finished) -> tuple[Path, dict[str, Any]]:
    folder = finished[0].run_dir / "checkpoints" / "step-00000006"
    return folder, read_tensors(folder)


def config_of(finished, tmp_path: Path, **init_from: Any) -> Config:
    project = finished[0]
    changes = {"init_from": {"path": str(project.run_dir)} | init_from, "optimizer.lr": 0.5}
    return tiny_config(project.shards, tmp_path / "new", changes)


@pytest.mark.parametrize("size", [1, 2])
def test_some_parameters_and_their_optimizer_state(ranks, finished, saved, tmp_path, size):
    config = config_of(finished, tmp_path, parameters=["blocks.0.*", "embed.weight"], optimizer=True)
    _, tensors = saved
    for parameters, states, said in ranks(size).run(start, config):
        taken = {name for name in parameters if name.startswith("blocks.0.") or name == "embed.weight"}
        assert 3 < len(taken) < len(parameters)
        for name, tensor in parameters.items():
            assert torch.equal(tensor, tensors[f"model.{name}"]) if name in taken else tensor.eq(7).all()
        assert states.keys() == taken
        for name, state in states.items():
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 6
            assert all(torch.equal(state[key], tensors[f"optimizer.state.{name}.{key}"]) for key in state)
        lines = said.splitlines()
        assert lines[0] == f"starting from {saved[0]}: weights and optimizer state of {len(taken)} parameters"
        rest = len(parameters) - len(taken)
        assert lines[1].startswith(f"  left fresh, {rest} of the model: ")
        assert lines[2].startswith(f"  skipped, {rest} of the checkpoint: ")


def test_without_the_optimizer_there_is_no_state(ranks, finished, tmp_path):
    [(parameters, states, said)] = ranks(1).run(start, config_of(finished, tmp_path))
    assert states == {} and not any(tensor.eq(7).all() for tensor in parameters.values())
    assert said.endswith(f": weights of {len(parameters)} parameters")


def test_what_does_not_fit_is_refused_or_left_fresh(ranks, finished, saved, tmp_path):
    project = finished[0]
    changes = {"model.vocab_size": 320, "model.layers": "m (s+m)*3", "init_from.path": str(saved[0])}
    strict = tiny_config(project.shards, tmp_path / "new", changes | {"init_from.parameters": ["*e*"]})
    with pytest.raises(RankFailed) as error:
        ranks(2).run(start, strict)
    assert str(error.value).count("embed.weight has shape [300, 32], not [320, 32]") == 2
    assert "is missing" in str(error.value) and "strict: false leaves it fresh" in str(error.value)
    lenient = tiny_config(project.shards, tmp_path / "new", changes | {"init_from.strict": False})
    for parameters, _, said in ranks(2).run(start, lenient):
        assert parameters["embed.weight"].eq(7).all()
        assert torch.equal(
            parameters["blocks.0.mixer.out_proj.weight"], saved[1]["model.blocks.0.mixer.out_proj.weight"]
        )
        assert "left fresh" in said and "embed.weight" in said


@pytest.mark.parametrize(
    ("init_from", "message"),
    [
        ({"parameters": ["blocks.9.*"]}, "init_from.parameters: blocks.9.* matches no parameter of the model"),
        (
            {"parameters": ["embed.weight"], "optimizer": True},
            "has no optimizer state embed.weight.step, embed.weight.exp_avg",
        ),
    ],
)
def test_what_is_not_there_is_refused(ranks, finished, saved, tmp_path, init_from, message):
    bare = checkpoints.save(tmp_path / "bare", tiny_config(finished[0].shards, tmp_path).model.model_copy())
    config = config_of(finished, tmp_path, **init_from | ({"path": str(bare)} if "optimizer" in init_from else {}))
    with pytest.raises(RankFailed) as error:
        ranks(1).run(start, config)
    assert message in str(error.value)


def test_a_run_trains_on_from_a_part(ranks, finished, tmp_path):
    config = config_of(finished, tmp_path, parameters=["blocks.*"], optimizer=True)
    config = config.model_copy(update={"train": config.train.model_copy(update={"duration": config.schedule.warmup})})
    [run] = ranks(1).run(runs.train, config)
    assert len(run.losses) == 4
    # And continues from its own checkpoint.
    [run] = ranks(1).run(runs.train, config)
    assert len(run.losses) == 4


def test_it_is_checked_as_a_setting(finished, project, capsys, monkeypatch):
    source = str(finished[0].run_dir)
    project.write({"init_from": {"path": source, "parameter": ["*"]}})
    status, text = check(project, capsys, monkeypatch)
    assert status == 2 and "init_from.parameter" in text and "did you mean parameters?" in text
    project.write({"init_from": {"parameters": ["*"]}})
    assert "init_from.path" in check(project, capsys, monkeypatch)[1]
    project.write({"init_from": 3})
    assert "init_from" in check(project, capsys, monkeypatch)[1]
    # A part of another model is compared when it is loaded.
    project.write({"init_from": {"path": source, "parameters": ["blocks.*"]}, "model.vocab_size": 320})
    assert check(project, capsys, monkeypatch)[0] == 0
    for strict, wrong in ((True, "nope.*"), (False, "nope.*")):
        project.write({"init_from": {"path": source, "parameters": [wrong, "block*"], "strict": strict}})
        status, text = check(project, capsys, monkeypatch)
        assert status == (2 if strict else 0), text
        project.write({"init_from": {"path": source, "parameters": [wrong, "model.*"], "strict": strict}})
        status, text = check(project, capsys, monkeypatch)
        assert status == 2 and "init_from.parameters.1" in text
        assert f"'{wrong}': matches no parameter of {source}/checkpoints/step-00000006" in text
    for written in (source, {"path": source}):
        project.write({"init_from": written})
        assert check(project, capsys, monkeypatch)[0] == 0
