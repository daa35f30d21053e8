"""Runs that train some of the model's own weights, and nothing else of it (adapt.train): checkpoints, and what reads them."""

import json
from pathlib import Path

import pytest
import torch

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.cli import main
from llmtrain.generate.load import load_model
from tests.support import runs
from tests.support.tiny import tiny_settings

OWN = "*_adapter.*"
CHANGES = {"train.duration": "4 steps", "checkpoint.interval": "2 steps", "schedule.warmup": "0 steps"}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, finished) -> Path:
    """The folder of a run that has trained the adapters that each use of the shared block has by its class."""
    folder = tmp_path_factory.mktemp("tuned")
    changes = CHANGES | {"init_from": str(finished[0].run_dir), "adapt": {"train": [OWN]}}
    (folder / "run.yaml").write_text(json.dumps(tiny_settings(finished[0].shards, folder / "run", changes)))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def logits(model: str, adapter: str | None = None) -> torch.Tensor:
    causal_lm, _ = load_model(model, torch.float32, adapter=adapter)
    with torch.no_grad():
        return causal_lm.logits(torch.arange(48).reshape(2, 24))


def test_its_checkpoints_hold_what_is_trained_and_name_the_base(tuned, finished):
    found, base = runs.read_tensors(checkpoint(tuned, 4)), runs.read_tensors(checkpoint(finished[0].run_dir, 6))
    names = {name.removeprefix("model.") for name in found if name.startswith("model.")}
    own = {name.removeprefix("model.") for name in base if name.startswith("model.") and "_adapter." in name}
    assert names == own and len(own) == 4  # a pair in each of two uses
    assert all("_adapter." in name for name in found if name.startswith("optimizer."))
    assert any(not torch.equal(found[f"model.{name}"], base[f"model.{name}"]) for name in own)
    record = manifests.read(checkpoint(tuned, 4)).base
    assert record is not None and record["save_id"] == manifests.read(checkpoint(finished[0].run_dir, 6)).save_id


def test_it_resumes_alike(tuned, finished, ranks, tmp_path):
    settings = json.loads((tuned.parent / "run.yaml").read_text()) | {"run_dir": str(tmp_path / "again")}
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    checkpoint(tuned, 2).rename(checkpoint(tmp_path / "again", 2))
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    found, expected = (runs.read_tensors(checkpoint(run, 4)) for run in (tmp_path / "again", tuned))
    assert all(torch.equal(found[name], value) for name, value in expected.items() if isinstance(value, torch.Tensor))


def test_it_is_read_and_exported_with_its_base(tuned, finished, tmp_path, capsys):
    found = logits(str(tuned))
    assert (found - logits(str(finished[0].run_dir))).abs().max() > 1e-4
    assert main(["export", str(tuned), str(tmp_path / "hf")]) == 0
    torch.testing.assert_close(logits(str(tmp_path / "hf")), found, atol=2e-5, rtol=1e-5)
    assert main(["generate", str(tuned), "--prompt", "the quick", "--max-new-tokens", "2"]) == 0


def test_beside_lora_both_are_trained_and_merged(finished, tmp_path, capsys):
    adapt = {"lora": {"rank": 2, "targets": ["*.in_proj"]}, "train": [OWN]}
    changes = CHANGES | {"init_from": str(finished[0].run_dir), "adapt": adapt}
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_settings(finished[0].shards, tmp_path / "run", changes)))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    held = {name for name in runs.read_tensors(checkpoint(tmp_path / "run", 4)) if name.startswith("model.")}
    assert {".lora." in name for name in held} == {True, False}
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "peft")]) == 2
    assert "adapt.train changed weights of the base" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    torch.testing.assert_close(logits(str(tmp_path / "merged")), logits(str(tmp_path / "run")), atol=2e-5, rtol=1e-5)


def test_names_that_match_nothing_are_an_error(finished, tmp_path, capsys):
    changes = {"init_from": str(finished[0].run_dir), "adapt": {"train": ["*.mlp_adaptor.*"]}}
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_settings(finished[0].shards, tmp_path / "run", changes)))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert "adapt.train: *.mlp_adaptor.* matches no weight; did you mean *.mlp_adapter.*" in capsys.readouterr().err
