"""Refusals of `llmtrain export` and `llmtrain import`: their message, and that nothing is left under the name."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.cli import main
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from tests.support import checkpoints
from tests.support.conversion import convert, publish, refused
from tests.support.project import copy_of


def test_an_unsupported_model_is_refused_by_its_feature_before_any_weight_is_read(tmp_path, capsys):
    config = checkpoints.mpt(32, 2, 300)
    folder = checkpoints.save(tmp_path / "checkpoint", config)
    for shard in folder.glob("*.safetensors"):
        checkpoints.flip_bit(shard, -1)
    edit_manifest(folder, lambda model: model["blocks"]["attn"].update(softcap=30.0))
    said = refused(capsys, "export", folder, tmp_path / "out")
    assert re.search(r"MptForCausalLM.*: model\.blocks\.attn\.softcap = 30\.0: .* set softcap: null", said)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def edit_manifest(folder: Path, change: Any) -> None:
    config = manifests.read(folder).config
    change(config["model"])
    checkpoints.edit_manifest(folder, config=config)


@pytest.fixture
def small(tmp_path) -> Path:
    return checkpoints.save(tmp_path / "checkpoint", checkpoints.mpt(32, 2, 300))


def test_import_refuses_links_that_lead_out_of_the_folder_but_not_the_hubs_cache(small, tmp_path, capsys):
    cache = tmp_path / "models--x"
    convert(capsys, "export", small, cache / "snapshots" / "abc")
    (cache / "blobs").mkdir()
    folder = cache / "snapshots" / "abc"
    for number, file in enumerate(list(folder.iterdir())):
        file.rename(cache / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    convert(capsys, "import", folder, tmp_path / "from the cache")
    (tmp_path / "private").write_text("secret")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "private")
    said = refused(capsys, "import", folder, tmp_path / "out")
    assert f"chat_template.jinja is a link that leads out of {folder}, to {tmp_path / 'private'}" in said
    (folder / "chat_template.jinja").unlink()
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "x.jinja").write_text("secret")
    (folder / "additional_chat_templates").symlink_to(tmp_path / "templates")
    assert "additional_chat_templates is a link" in refused(capsys, "import", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_refused(small, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    for arguments in (["export", small], ["import", tmp_path / "nowhere"]):
        assert f"{tmp_path / 'out'} exists already" in refused(capsys, *arguments, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.mkdir(), "holds no checkpoint"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: publish(path, "mpt"), "is a model in Hugging Face format"),
    ],
    ids=["absent", "empty", "file", "published"],
)
def test_what_is_no_checkpoint_is_refused(make, message, tmp_path, capsys):
    make(tmp_path / "x")
    said = refused(capsys, "export", tmp_path / "x", tmp_path / "out")
    assert said.startswith(str(tmp_path / "x")) and message in said
    assert not (tmp_path / "out.partial").exists()


def test_tensors_that_are_not_the_configs_are_refused_each_by_name(small, tmp_path, capsys):
    edit_manifest(small, lambda model: model.update(layers="attn*3"))
    assert "blocks.2.norm.weight [32] is missing" in refused(capsys, "export", small, tmp_path / "out")
    edit_manifest(small, lambda model: model.update(layers="attn*1"))
    assert "blocks.1.norm.weight has no place in the model" in refused(capsys, "export", small, tmp_path / "out")
    edit_manifest(small, lambda model: model.update(layers="attn*2", vocab_size=301))
    said = refused(capsys, "export", small, tmp_path / "out")
    assert "embed.weight has shape [300, 32], its config says [301, 32]" in said
    assert not (tmp_path / "out.partial").exists()


def test_a_damaged_shard_is_refused_and_nothing_appears(small, tmp_path, capsys):
    [shard] = small.glob("*.safetensors")
    checkpoints.flip_bit(shard, -10_000)
    assert f"is damaged: {shard.name} is not what was written" in refused(capsys, "export", small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_disk_space_is_reported_before_anything_is_written(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    publish(tmp_path / "source", "mpt")
    for arguments in (["export", small], ["import", tmp_path / "source"]):
        said = refused(capsys, *arguments, tmp_path / "out")
        assert f"{tmp_path / 'out'} needs" in said and f"{tmp_path} has 1 kB free" in said
    assert not (tmp_path / "out.partial").exists()


def test_an_adapter_is_to_be_merged(tmp_path, capsys):
    publish(tmp_path / "source", "mpt")
    (tmp_path / "source" / "model.safetensors").rename(tmp_path / "source" / "adapter_model.safetensors")
    assert "--base CHECKPOINT" not in refused(capsys, "import", tmp_path / "source", tmp_path / "out")
    (tmp_path / "source" / "adapter_config.json").write_text("{}")
    assert "--base CHECKPOINT" in refused(capsys, "import", tmp_path / "source", tmp_path / "out")


def test_the_tokenizer_must_be_there_and_fit(small, tmp_path, capsys):
    edit_manifest(small, lambda model: model.update(vocab_size=269))
    said = refused(capsys, "export", small, tmp_path / "out")
    assert "the tokenizer has 270 tokens, the model 269" in said and "--tokenizer" in said
    edit_manifest(small, lambda model: model.update(vocab_size=300))
    (small / "tokenizer").rename(tmp_path / "elsewhere")
    assert "no tokenizer/ folder in it" in (said := refused(capsys, "export", small, tmp_path / "out"))
    assert "name one with --tokenizer" in said
    convert(capsys, "export", small, tmp_path / "out", "--tokenizer", tmp_path / "elsewhere")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_float16_must_hold_the_weights(tmp_path, capsys):
    folder = checkpoints.save(
        tmp_path / "checkpoint", checkpoints.mpt(32, 2, 300), lambda shape: torch.full(shape, 1e5)
    )
    said = refused(capsys, "export", folder, tmp_path / "out", "--dtype", "float16")
    assert "transformer.wte.weight holds numbers that float16 cannot" in said and "--dtype bfloat16" in said
    convert(capsys, "export", folder, tmp_path / "out", "--dtype", "bfloat16")


def test_a_source_that_cannot_be_imported_is_refused_by_name(tmp_path, capsys):
    out = tmp_path / "out"
    source = publish(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    assert "hidden_act" in refused(capsys, "import", source, out)
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 301}))
    assert "has shape [300, 32], expected [301, 32]" in refused(capsys, "import", source, out)
    (source / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "gpt2" in refused(capsys, "import", source, out)
    assert str(tmp_path / "none") in refused(capsys, "import", tmp_path / "none", out)
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_damaged_sources_are_reported_and_leave_nothing_under_the_name(tmp_path, capsys):
    source = publish(tmp_path / "source", "llama, tied")
    tensors = {name: tensor.clone() for name, tensor in open_hf_checkpoint(source).items()}
    save_file(tensors | {"lm_head.weight": torch.ones(300, 32)}, source / "model.safetensors")
    assert "model.embed_tokens.weight and lm_head.weight differ" in refused(capsys, "import", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupted_import_leaves_nothing(tmp_path, capsys, monkeypatch):
    source = publish(tmp_path / "source", "llama")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("llmtrain.convert.import_hf._read", interrupt)
    assert main(["import", str(source), str(tmp_path / "out")]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    monkeypatch.undo()
    convert(capsys, "import", source, tmp_path / "out")


def test_a_source_without_tokenizer_is_imported_with_a_word(tmp_path, capsys):
    source = publish(tmp_path / "source", "mpt")
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert main(["import", str(source), str(tmp_path / "out")]) == 0
    assert "has no tokenizer" in capsys.readouterr().err
    for arguments in (
        ["export", tmp_path / "out", tmp_path / "again"],
        ["generate", tmp_path / "out", "--prompt", "x"],
    ):
        assert "no tokenizer" in refused(capsys, *arguments)


def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_with_a_word(finished, tmp_path, capsys):
    run = copy_of(finished, tmp_path).run_dir
    (run / "checkpoints" / "step-00000099").mkdir()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "step-00000099 is not a complete checkpoint" in captured.err and "step-00000006 ->" in captured.out


def test_the_commands_are_parsed_and_refused_without_torch(tmp_path):
    program = (
        "import sys\nfrom llmtrain.cli import main\n"
        "assert [main([command, 'x', 'out']) for command in ('export', 'import')] == [2, 2]\n"
        "assert 'torch' not in sys.modules"
    )
    (tmp_path / "out").touch()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=300, check=True)


def test_a_size_that_is_none_is_refused(tmp_path, capsys):
    said = refused(capsys, "export", tmp_path, tmp_path / "out", "--max-shard-size", "large")
    assert "--max-shard-size large: expected a size such as 5GB" in said


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, capsys):
    from safetensors.torch import load_file

    source = publish(tmp_path / "source", "llama")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][3, 5:7] = torch.tensor([float("nan"), float("-inf")])
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    said = refused(capsys, "import", source, tmp_path / "out")
    assert "model.layers.1.self_attn.k_proj.weight" in said and "2 of 2,048 values are not finite" in said
    assert not (tmp_path / "out").exists()
