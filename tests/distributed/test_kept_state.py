"""What checkpoints hold beside weights and AdamW's moments, and how runs with it resume: parameter groups, Muon's momentum, the
window of train.spike, the moving average of train.ema."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from llmtrain.checkpoint.format.manifest import CheckpointError
from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.eval.scoring.load import find_model
from llmtrain.generate.load import load_model
from llmtrain.train.resume import check_resumption
from tests.support.runs import read_tensors, train
from tests.support.tiny import tiny_config

STEPS = 9
KEPT: dict[str, Any] = {
    "train.duration": f"{STEPS} steps",
    "eval.interval": f"{STEPS} steps",
    "checkpoint.interval": "3 steps",
    "train.spike": {"window": 4, "deviations": 0.05},  # so low that some steps are skipped
    "train.ema": {"decay": 0.8},
    "optimizer.type": "muon",
    "optimizer.lr": 0.03,
    "optimizer.groups": [{"match": "*.A_log", "lr": 0.0, "weight_decay": 0.0}, {"match": "embed.*", "lr_factor": 3.0}],
}
ONE_STEP = {"train.duration": "1 steps", "schedule.warmup": "0 steps", "eval.interval": "1 steps"}
FIRST, LAST = (f"checkpoints/step-{step:08d}" for step in (1, STEPS))


@pytest.fixture(scope="module")
def uninterrupted(ranks, shards, tmp_path_factory) -> dict[int, Path]:
    """Folders of the whole run, by number of ranks."""
    folders = {size: tmp_path_factory.mktemp("whole") / "run" for size in (1, 2)}
    for size, folder in folders.items():
        ranks(size).run(train, tiny_config(shards, folder, KEPT))
    return folders


def assert_same(found: dict[str, Any], expected: dict[str, Any], relative: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=relative, atol=relative, msg=name)
        elif relative:
            assert found[name] == pytest.approx(value, rel=relative), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_a_resumed_run_is_bit_identical(ranks, shards, tmp_path, uninterrupted, size):
    config = tiny_config(shards, tmp_path / "run", KEPT)
    ranks(size).run(train, config, 7)  # a step after the checkpoint is lost
    ranks(size).run(train, config)
    assert_same(read_tensors(tmp_path / "run" / LAST), read_tensors(uninterrupted[size] / LAST), 0.0)


@pytest.mark.parametrize(
    "legs",
    [pytest.param([(1, 1, 7), (2, 1, None)], marks=pytest.mark.ci), [(2, 2, None)]],
    ids=["over one rank and back", "to ranks that share sequences"],
)
def test_a_run_moves_between_meshes(ranks, shards, tmp_path, uninterrupted, legs):
    """From step 3 on two ranks. legs: (ranks, ranks that share a sequence, the step before which it is interrupted)."""
    shutil.copytree(uninterrupted[2], tmp_path / "run")
    for step in (6, 9):
        shutil.rmtree(tmp_path / "run" / f"checkpoints/step-{step:08d}")
    for size, context, stop_before in legs:
        shared = {"train.parallel.context": context}
        ranks(size).run(train, tiny_config(shards, tmp_path / "run", KEPT | shared), stop_before)
    assert_same(read_tensors(tmp_path / "run" / LAST), read_tensors(uninterrupted[2] / LAST), 1e-3)


def test_an_average_begins_with_the_weights_that_a_run_starts_from(ranks, shards, tmp_path, uninterrupted):
    start = {"init_from": {"path": str(uninterrupted[2])}, "train.ema": {"decay": 0.8}}
    ranks(1).run(train, tiny_config(shards, tmp_path / "run", ONE_STEP | start))
    before, after = (read_tensors(folder) for folder in (uninterrupted[2] / LAST, tmp_path / "run" / FIRST))
    for name in (name.removeprefix("model.") for name in before if name.startswith("model.")):
        # Of the first step the average keeps 2 / 11: AverageConfig.decay_of.
        expected = before[f"model.{name}"].lerp(after[f"model.{name}"], 9 / 11)
        torch.testing.assert_close(after[f"ema.{name}"], expected, msg=name)
    assert not torch.equal(before["model.embed.weight"], after["model.embed.weight"])


def test_what_is_kept_is_what_was_asked_for(uninterrupted):
    first, last = (read_tensors(uninterrupted[1] / f"checkpoints/step-{step:08d}") for step in (3, STEPS))
    decays = [name for name in last if name.startswith("model.") and name.endswith("A_log")]
    assert decays and all(torch.equal(first[name], last[name]) for name in decays)  # lr 0
    weights = [name.removeprefix("model.") for name in last if name.startswith("model.")]
    assert {name.removeprefix("ema.") for name in last if name.startswith("ema.")} == set(weights)
    assert all(last[f"ema.{name}"].dtype == torch.float32 for name in weights)
    assert not torch.equal(last["ema.embed.weight"], last["model.embed.weight"])
    by_muon = {name for name in weights if f"optimizer.state.{name}.momentum_buffer" in last}
    assert "blocks.0.mixer.in_proj.weight" in by_muon and "embed.weight" not in by_muon
    assert {name for name in weights if f"optimizer.state.{name}.exp_avg" in last} == set(weights) - by_muon
    rates = {name: last[f"optimizer.param_groups.{name}.lr"] for name in weights}
    assert rates["embed.weight"] == pytest.approx(3 * rates["norm.weight"])
    assert len(last["spike.losses"]) == len(last["spike.norms"]) == 4
    assert 0 < last["spike.skipped"] < STEPS


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"optimizer.groups": [{"match": "*.A_log", "lr": 0.1}]}, "optimizer.groups: "),
        ({"train.ema": {"decay": 0.9}}, "train.ema.decay: 0.8 -> 0.9"),
        ({"train.ema": None}, "train.ema: "),
        ({"train.spike": None}, "train.spike: "),
    ],
)
def test_what_would_change_their_meaning_is_refused(shards, uninterrupted, changes, line):
    with pytest.raises(CheckpointError, match=line):
        check_resumption(tiny_config(shards, uninterrupted[1], KEPT | changes))


def test_checkpoint_show_counts_the_average(uninterrupted, capsys):
    assert main(["checkpoint", "show", str(uninterrupted[1])]) == 0
    shown = capsys.readouterr().out
    model, average = (re.search(rf"^{part} +(\d+ tensors.*)$", shown, re.MULTILINE) for part in ("model", "ema"))
    assert model and average and model[1] == average[1]


def test_the_average_is_generated_from_and_exported_by_choice(uninterrupted, tmp_path):
    run = str(uninterrupted[2])
    kept = read_tensors(uninterrupted[2] / LAST)
    for ema, prefix in ((False, "model."), (True, "ema.")):
        chosen = ["--ema"] * ema
        model, _ = load_model(run, torch.float32, ema=ema)
        for name, parameter in model.hybrid.named_parameters():
            assert torch.equal(parameter, kept[prefix + name]), name
        assert main(["export", run, str(tmp_path / prefix), *chosen]) == 0
        assert main(["generate", run, "--prompt", "the", "--max-new-tokens", "2", *chosen]) == 0
        assert torch.equal(
            load_file(tmp_path / prefix / "model.safetensors")["model.embed_tokens.weight"],
            kept[f"{prefix}embed.weight"],
        )
    for read in (load_model, find_model):
        with pytest.raises(UserError, match="is no checkpoint of llmtrain, and has no moving average"):
            read(str(tmp_path / "ema."), ema=True)
    found = [find_model(run, ema=ema) for ema in (False, True)]
    assert found[0].identity != found[1].identity  # answers of one are not taken for the other's


def test_a_run_without_an_average_is_refused(ranks, shards, tmp_path):
    ranks(1).run(train, tiny_config(shards, tmp_path / "run", ONE_STEP))
    for read in (
        lambda: load_model(str(tmp_path / "run"), ema=True),
        lambda: find_model(str(tmp_path / "run"), ema=True),
    ):
        with pytest.raises(
            CheckpointError, match=r"has no moving average of the weights: its run was .* without train\.ema"
        ):
            read()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--ema"]) == 2
    assert not (tmp_path / "out").exists()
    assert {name.partition(".")[0] for name in read_tensors(tmp_path / "run" / FIRST)} == {"model", "optimizer"}
