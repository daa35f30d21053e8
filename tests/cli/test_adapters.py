"""Runs that train adapters beside frozen weights (adapt.lora): the optimizer, checkpoints, and what reads them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from transformers import AutoModelForCausalLM

from llmtrain.adapt.base import converters_of, meta_model
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.repository import Repository
from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.eval.scoring.load import find_model
from llmtrain.generate.load import checkpoint_model_config, load_model
from llmtrain.models.slices import local_of
from llmtrain.schema.adapt import AdaptConfig, LoraConfig
from llmtrain.schema.config import Config
from tests.support import runs
from tests.support.checkpoints import edit_manifest
from tests.support.project import Project
from tests.support.tiny import tiny_settings

TARGETS = ["*.wqkv", "*.in_proj", "blocks.1.mixer.out_proj"]
CHANGES = {
    "adapt": {"lora": {"rank": 4, "alpha": 8.0, "targets": TARGETS}},
    "train.duration": "4 steps",
    "checkpoint.interval": "2 steps",
    "schedule.warmup": "0 steps",
    "eval.interval": "4 steps",
}


def train(settings: dict[str, Any], stop_before: int | None = None) -> runs.Run:
    """A job."""
    return runs.train(Config.model_validate_json(json.dumps(settings)), stop_before)


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def settings_of(finished: tuple[Project, str], run: Path, **changes: Any) -> dict[str, Any]:
    base, _ = finished
    return tiny_settings(base.shards, run, CHANGES | {"init_from": str(base.run_dir)} | changes)


@pytest.mark.parametrize(
    "kind, size",
    [("adamw", 1), ("muon", 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("adamw", 2), ("muon", 1)))],
)
def test_adapters_train_and_resume(ranks, finished, tmp_path, size, kind):
    settings = [
        settings_of(finished, tmp_path / name, **{"optimizer.type": kind, "train.ema": {"decay": 0.5}})
        for name in ("whole", "stopped")
    ]
    whole, *_ = ranks(size).run(train, settings[0])
    ranks(size).run(train, settings[1], 3)
    resumed, *_ = ranks(size).run(train, settings[1])
    assert resumed.losses == whole.losses and whole.losses[4] < whole.losses[1]
    found, expected = (runs.read_tensors(checkpoint(tmp_path / name, 4)) for name in ("stopped", "whole"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


def test_adapters_of_random_weights_begin_as_these_and_are_warned_of(finished, tmp_path, capsys):
    changes = {"init_from": None, "adapt": {"lora": {"rank": 2, "dora": True}}, "train.duration": "1 steps"}
    settings = settings_of(finished, tmp_path / "run", **changes, **{"checkpoint.interval": "1 steps"})
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    shown = "".join(capsys.readouterr())
    assert "frozen weights are random ones; name the model to adapt in init_from" in " ".join(shown.split())
    found = runs.read_tensors(checkpoint(tmp_path / "run", 1))
    name = next(name for name in found if name.startswith("model.") and ".lora.magnitude.whole" in name)
    norms = found[f"{name.partition('.lora.')[0]}.weight"].norm(dim=1)
    assert torch.allclose(found[name], norms, atol=0.05) and not torch.allclose(norms, torch.ones(()), atol=0.1)


def test_adapters_train_beside_a_base_in_float8_with_recomputation_and_state_on_the_host(ranks, finished, tmp_path):
    changes = {
        "train.precision": "amp_bf16",
        "train.float8": {"emulate": True, "small_products": True},
        "train.activation_checkpointing": {"type": "full"},
        "optimizer.type": "adamw_8bit",
        "optimizer.offload": True,
    }
    found, *_ = ranks(2).run(train, settings_of(finished, tmp_path / "run", **changes))
    assert found.losses[4] < found.losses[1]
    manifest = manifests.read(checkpoint(tmp_path / "run", 4))
    moments = {n for n in indexes.read(checkpoint(tmp_path / "run", 4), manifest).tensors if n.endswith("_codes")}
    assert (
        manifest.base is not None and len(moments) == 2 * 16
    )  # both, of A and B of five layers, of which two have q, k and v


class Watch(LoggerDestination):
    """Compares frozen weights with those of the first step after every one, and counts the optimizer's state."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if not hasattr(self, "first"):
            self.names = [name for name, one in state.model.named_parameters() if not one.requires_grad]
            self.first = [weight.clone() for weight in self._frozen(state)]
            self.equal = True

    def batch_end(self, state: State, logger: Logger) -> None:
        self.equal &= all(map(torch.equal, self.first, self._frozen(state)))
        [optimizer] = state.optimizers
        moments = [t for of in optimizer.state.values() for t in of.values() if isinstance(t, torch.Tensor) and t.ndim]
        self.state = sum(local_of(moment).numel() for moment in moments)
        self.trained = sum(local_of(p).numel() for p in state.model.parameters() if p.requires_grad)

    def _frozen(self, state: State) -> list[torch.Tensor]:
        return [local_of(parameter) for parameter in state.model.parameters() if not parameter.requires_grad]


def watched(settings: dict[str, Any]) -> tuple[dict[int, float], bool, int, int, int]:
    """A job: (losses, frozen weights stay as they are, how many, elements of optimizer state and of trained parameters)."""
    watch = Watch()
    with runs.observed_by(watch):
        losses = runs.train(Config.model_validate_json(json.dumps(settings))).losses
    return losses, watch.equal, len(watch.first), watch.state, watch.trained


EVERYWHERE = {"lora": {"rank": 2, "dora": True}}


@pytest.mark.parametrize("steps", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_frozen_weights_stay_and_every_division_of_the_ranks_computes_the_same(ranks, finished, tmp_path, steps):
    changes = {"adapt": EVERYWHERE, "train.duration": f"{steps} steps", "train.microbatch_size": 4}
    whole = ranks(1).run(watched, settings_of(finished, tmp_path / "whole", **changes))[0]
    parallel: list[dict[str, Any]] = [{"train.parallel": {name: 2}} for name in ("tensor", "context")] + [{}]
    if steps > 2:
        parallel += [{"train.parallel": {"pipeline": 2}, "train.microbatch_size": 2}, {"optimizer.type": "adamw_8bit"}]
    found = [
        one
        for number, division in enumerate(parallel)
        for one in ranks(2).run(watched, settings_of(finished, tmp_path / str(number), **changes | division))
    ]
    for losses, equal, frozen, state, trained in [whole, *found]:
        assert equal and frozen and state >= 2 * trained
        assert losses == pytest.approx(whole[0], rel=1e-5 if steps == 2 else 1e-3)


def test_weights_in_4_bits_train_and_resume(ranks, finished, tmp_path):
    adapt = {"lora": {"rank": 2}, "base": "nf4"}
    first = settings_of(finished, tmp_path / "whole", adapt=adapt)
    whole = ranks(1).run(watched, first)[0]
    again = settings_of(finished, tmp_path / "stopped", adapt=adapt)
    ranks(2).run(train, again, 3)
    resumed, *_ = ranks(2).run(train, again)
    wide = ranks(1).run(watched, settings_of(finished, tmp_path / "wide", adapt=adapt | {"base": "bf16"}))[0]
    assert resumed.losses == pytest.approx(whole[0], rel=1e-5) and whole[2] < wide[2]
    assert 0 < abs(whole[0][1] - wide[0][1]) < 0.05  # of weights that are 9 % apart
    assert logits(str(tmp_path / "stopped")).isfinite().all()
    names = indexes.read(checkpoint(tmp_path / "whole", 4), manifests.read(checkpoint(tmp_path / "whole", 4))).tensors
    assert all(".lora." in name for name in names)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, finished) -> Path:
    """The folder of a run that has trained adapters for four steps on one process."""
    folder = tmp_path_factory.mktemp("adapted")
    targets = ["*.in_proj", "blocks.1.mixer.out_proj", "*.shared_input.linear"]  # whose weights one layer alone uses
    changes = {"train.ema": {"decay": 0.5}, "adapt": {"lora": {"rank": 4, "alpha": 8.0, "targets": targets}}}
    settings = settings_of(finished, folder / "run", **changes)
    (folder / "run.yaml").write_text(json.dumps(settings))
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


def logits(model: str, ema: bool = False) -> torch.Tensor:
    causal_lm, _ = load_model(model, torch.float32, ema=ema)
    with torch.no_grad():
        return causal_lm.logits(torch.arange(48).reshape(2, 24))


def test_a_checkpoint_has_the_adapters_alone_and_names_its_base(adapted, finished):
    folder = checkpoint(adapted, 4)
    manifest, base = manifests.read(folder), manifests.read(finished[0].run_dir / "checkpoints" / "step-00000006")
    assert manifest.base is not None and manifest.base["save_id"] == base.save_id
    assert manifest.format == 3 and base.format == 2
    names = indexes.read(folder, manifest).tensors
    assert all(".lora." in name for name in names)
    assert {name.partition(".")[0] for name in names} == {"model", "optimizer", "ema"}
    assert manifest.nbytes < base.nbytes / 4
    found, expected = runs.read_tensors(folder), runs.read_tensors(finished[0].run_dir / "checkpoints/step-00000006")
    assert not found.keys() >= {name for name in expected if name.startswith("model.")}


def test_adapters_are_read_scored_and_exported_with_their_base(adapted, finished, tmp_path, capsys, monkeypatch):
    run = str(adapted)
    found = logits(run)
    assert (found - logits(str(finished[0].run_dir))).abs().max() > 1e-3
    assert (found - logits(run, ema=True)).abs().max() > 1e-5
    for name, options in (("merged", []), ("averaged", ["--ema"])):
        assert main(["export", run, str(tmp_path / name), "--merge", *options]) == 0
        torch.testing.assert_close(logits(str(tmp_path / name)), logits(run, ema=bool(options)), atol=2e-5, rtol=1e-5)
    assert main(["checkpoint", "convert", run, str(tmp_path / "whole"), "--to", "llmtrain"]) == 0
    assert manifests.read(tmp_path / "whole").base is None
    assert torch.equal(logits(str(tmp_path / "whole")), found)
    capsys.readouterr()
    assert main(["checkpoint", "show", run]) == 0
    assert f"base       {checkpoint(finished[0].run_dir, 6).resolve()}, save " in capsys.readouterr().out
    assert main(["checkpoint", "verify", run]) == 0
    assert main(["generate", run, "--prompt", "the quick", "--max-new-tokens", "2"]) == 0


def test_another_rank_count_and_saving_again_keep_the_base(ranks, adapted, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    changes = {
        "train.ema": {"decay": 0.5},
        "train.duration": "6 steps",
        "adapt": manifests.read(checkpoint(run, 4)).config["adapt"],
    }
    found, *_ = ranks(2).run(train, settings_of(finished, run, **changes))
    assert list(found.losses) == [1, 2, 3, 4, 5, 6]
    first, last = (manifests.read(checkpoint(run, step)) for step in (4, 6))
    assert last.base == first.base
    names = [indexes.read(checkpoint(run, one.step), one).tensors.keys() for one in (first, last)]
    assert names[0] == names[1]


def another_save(folder: Path) -> None:
    again = folder.with_name("again")
    assert main(["checkpoint", "convert", str(folder), str(again), "--to", "llmtrain"]) == 0
    shutil.rmtree(folder)
    again.rename(folder)


def damaged(folder: Path) -> None:
    [tensors, *_] = sorted(folder.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (shutil.rmtree, "no such folder"),
        (another_save, "is another save"),
        (damaged, "is damaged"),
    ],
    ids=["missing", "another save", "damaged"],
)
def test_a_base_that_is_not_the_one_is_refused(adapted, finished, tmp_path, capsys, harm, reason):
    base, run = tmp_path / "base" / "checkpoints" / "step-00000006", tmp_path / "lora"
    shutil.copytree(finished[0].run_dir, tmp_path / "base")
    shutil.copytree(adapted, run)
    record = manifests.read(checkpoint(run, 4)).base
    assert record is not None
    edit_manifest(
        checkpoint(run, 4), base=record | {"address": str(tmp_path / "gone" / "base" / "checkpoints" / base.name)}
    )
    # Where it was there is none, and it is found beside the run.
    assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "1"]) == 0
    harm(base)
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "the", "--max-new-tokens", "1"]) == 2
    assert reason in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "out"), "--merge"]) == 2 and not (tmp_path / "out").exists()
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_describe_shows_what_is_trained(adapted, finished, capsys):
    file = str(adapted.parent / "run.yaml")
    assert main(["describe", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["describe", file, "adapt=null", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    added = found["total_parameters"] - plain["total_parameters"]
    assert 0 < added == found["trained_parameters"] < plain["trained_parameters"] == plain["total_parameters"]
    assert found["memory"]["optimizer"] == 8 * added and found["memory"]["average"] == 4 * added
    assert found["memory"]["gradients"] < plain["memory"]["gradients"] / 4
    active, trained = found["active_parameters"], found["trained_active_parameters"]
    squares = found["forward_full"]["attention"] + found["forward_full"]["scan"]
    assert found["training_foundry"] == 4 * active + 2 * trained + 3 * squares
    assert found["training_causal"] < 0.8 * plain["training_causal"]
    assert main(["describe", file, "optimizer.type=muon"]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"trained +{added:,} ", text) and "4 rather than 6 for a frozen parameter" in " ".join(
        text.split()
    )
    # Mamba-2's input with five parts in one adapter, three times; an output, and two layers behind shared blocks.
    matrices, maps = 2 * (3 + 1 + 2), 3 * (1 + 5) + 2 * (1 + 2)
    assert f"Muon, AdamW: {matrices} matrices ({maps} linear maps), {added:,} parameters; 0 by AdamW" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapt": None}, "adapt"),
        (
            {"adapt": {"lora": {"targets": ["*.wq"]}}, "init_from": None},
            "*.wq matches no layer; there are",
        ),
        ({"optimizer.groups": [{"match": "embed.*", "lr": 1e-4}]}, "matches no trained parameter"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(adapted, tmp_path, finished, capsys, changes, message):
    settings = settings_of(finished, tmp_path / "run", **{"init_from": str(adapted)} | changes)
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_adapters_go_to_pefts_folder_and_come_back(adapted, finished, tmp_path, capsys):
    base, out, again = str(finished[0].run_dir), tmp_path / "peft", tmp_path / "again"
    assert main(["export", str(adapted), str(out)]) == 0
    assert main(["export", base, str(tmp_path / "base")]) == 0
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(out)).eval()
    with torch.no_grad():
        found = theirs(torch.arange(48).reshape(2, 24), use_cache=False).logits
    torch.testing.assert_close(found, logits(str(adapted)), atol=2e-5, rtol=1e-5)
    for adapter in (out, adapted):  # beside a checkpoint, and beside a published folder
        for model in (base, str(tmp_path / "base")):
            beside, _ = load_model(model, torch.float32, adapter=str(adapter))
            with torch.no_grad():
                assert torch.equal(beside.logits(torch.arange(48).reshape(2, 24)), logits(str(adapted)))
    assert main(["import", str(out), str(again), "--base", base]) == 0
    assert main(["export", str(again), str(tmp_path / "twice")]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (out / name).read_bytes()
    assert main(["generate", base, "--adapter", str(out), "--prompt", "the", "--max-new-tokens", "1"]) == 0

    assert find_model(base).identity != find_model(base, adapter=str(out)).identity
    other = tmp_path / "other"
    assert main(["checkpoint", "convert", base, str(other), "--to", "llmtrain"]) == 0  # the same weights, another save
    capsys.readouterr()
    for command in (
        ["generate", str(other), "--adapter", str(out), "--prompt", "the"],
        ["generate", str(other), "--adapter", str(adapted), "--prompt", "the"],
        ["import", str(out), str(tmp_path / "none"), "--base", str(other)],
    ):
        assert main(command) == 2
        assert "is another one (" in capsys.readouterr().err


@pytest.mark.parametrize("targets", [["*.wqkv"], ["embed"]])
def test_a_merge_that_is_not_exact_is_refused(finished, targets):
    """The use of a block that several layers share; an embedding that is the head too."""
    adapt = AdaptConfig(lora=LoraConfig(targets=targets))
    config = checkpoint_model_config(*Repository(finished[0].run_dir).open())
    config = config.model_copy(update={"tie_embeddings": True})
    [lora, _] = converters_of(config, adapt)
    with pytest.raises(UserError, match="without --merge"):
        lora.merged(dict(meta_model(config, adapt).named_parameters()))
