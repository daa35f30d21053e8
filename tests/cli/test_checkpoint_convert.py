"""`llmtrain checkpoint convert`: from format 1, from ours, and from what Composer itself writes."""

import dataclasses
import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.repository import Repository
from llmtrain.checkpoint.stores.mounted import MountedStore
from llmtrain.checkpoint.upload import upload
from llmtrain.convert.checkpoint_tensors import CheckpointTensors
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from llmtrain.schema.config import Config
from tests.support import checkpoints, foundry
from tests.support.conversion import CONFIGS, convert, publish, refused
from tests.support.pickled import Bomb
from tests.support.stores import flip
from tests.support.tiny import tiny_config


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, flat, after its hashes were compared."""
    manifest = manifests.read(folder)
    manifests.verify(folder, manifest)
    tensors = CheckpointTensors(folder, manifest)
    sizes = {name: torch.Size(tensors.shape(name) or ()).numel() for name in tensors.names("")}
    return {name: next(tensors.elements(name, [size])) for name, size in sizes.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_files(finished, tmp_path, capsys, count):
    run, out = finished[0].run_dir, tmp_path / "out"
    text = convert(capsys, "checkpoint", "convert", run, out, "--to", "llmtrain", "--shards", count)
    folder, before = Repository(run).open()
    after = manifests.read(out)
    files = len(list(out.glob("*.safetensors")))
    assert abs(files - count) <= 1 and f"in {files} file(s), with its optimizer" in text
    assert after.save_id != before.save_id
    kept = ("step", "tokens", "config", "clock", "data", "versions")
    assert all(getattr(after, name) == getattr(before, name) for name in kept)
    assert same(read(folder), read(out))
    assert indexes.read(folder, before).values == indexes.read(out, after).values


def test_what_is_damaged_is_not_passed_on(finished, tmp_path, capsys):
    convert(capsys, "checkpoint", "convert", finished[0].run_dir, tmp_path / "one", "--to", "llmtrain")
    flip(next((tmp_path / "one").glob("*.safetensors")))
    text = refused(capsys, "checkpoint", "convert", tmp_path / "one", tmp_path / "two", "--to", "llmtrain")
    assert "is not what was written" in text and not (tmp_path / "two").exists()


def test_an_import_keeps_its_tokenizer_and_goes_to_hugging_face_again(tmp_path, capsys):
    source = publish(tmp_path / "source", "llama")
    convert(capsys, "import", source, tmp_path / "imported")
    text = convert(capsys, "checkpoint", "convert", tmp_path / "imported", tmp_path / "ours", "--to", "llmtrain")
    assert "weights alone" in text and same(read(tmp_path / "imported"), read(tmp_path / "ours"))
    options = ["--to", "hf", "--shards", 2, "--dtype", "bfloat16"]
    convert(capsys, "checkpoint", "convert", tmp_path / "ours", tmp_path / "hf", *options)
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) in (2, 3)
    published, original = open_hf_checkpoint(tmp_path / "hf"), open_hf_checkpoint(source)
    assert set(published) == set(original)
    assert all(torch.equal(published[name], original[name].bfloat16()) for name in original)


def test_a_checkpoint_in_a_store_serves_as_one_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    source = publish(tmp_path / "source", "mpt")
    convert(capsys, "import", source, tmp_path / "step-00000000")
    bucket = MountedStore(tmp_path / "mounted")
    upload(bucket, tmp_path / "step-00000000")
    convert(capsys, "checkpoint", "convert", bucket.url, tmp_path / "ours", "--to", "llmtrain")
    assert same(read(tmp_path / "step-00000000"), read(tmp_path / "ours"))
    convert(capsys, "export", bucket.url, tmp_path / "hf", "--tokenizer", source)
    assert set(open_hf_checkpoint(tmp_path / "hf")) == set(open_hf_checkpoint(source))


def save_format_1(config: Config, folder: Path) -> dict[str, Any]:
    """A job: a checkpoint as llmtrain wrote it in format 1, of a model that has taken a step; what it holds."""
    from tests.distributed.test_save_load import build

    model, optimizer = build(config)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, checkpoint_id=folder)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        content = {"step": 3, "tokens": 8, "config": config.model_dump(mode="json"), "clock": {"batch": 3}, "format": 1}
        (folder / "manifest.json").write_text(json.dumps(content | {"data": {}, "versions": {}, "files": files}))
    return whole(state)


def load(config: Config, folder: Path) -> dict[str, Any]:
    """A job: what a fresh model and optimizer hold after loading."""
    from llmtrain.checkpoint import save_load
    from tests.distributed.test_save_load import build

    model, optimizer = build(config, seed=2)
    save_load.load(folder, model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return whole(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    )


def whole(state: dict[str, Any]) -> dict[str, Any]:
    flat = {f"{part}.{name}": value for part, values in state.items() for name, value in values.items()}
    return {
        n: v.full_tensor().tolist() if hasattr(v, "full_tensor") else getattr(v, "tolist", lambda v=v: v)()
        for n, v in flat.items()
    }


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_format_1_comes_with_its_optimizer(ranks, shards, tmp_path, capsys, size):
    config = tiny_config(shards, tmp_path / "run")
    old = tmp_path / "run" / "checkpoints" / "step-00000003"
    [saved, *_] = ranks(size).run(save_format_1, config, old)
    text = convert(capsys, "checkpoint", "convert", tmp_path / "run", tmp_path / "step-00000003", "--to", "llmtrain")
    assert "with its optimizer" in text
    written = manifests.read(tmp_path / "step-00000003")
    assert (written.step, written.tokens, written.clock) == (3, 8, {"batch": 3})
    [loaded, *_] = ranks(1).run(load, config, tmp_path / "step-00000003")
    assert loaded == saved
    convert(capsys, "checkpoint", "convert", old, tmp_path / "hf", "--to", "hf")
    assert open_hf_checkpoint(tmp_path / "hf").config["model_type"] == "zamba2"


def test_no_code_of_a_pickle_is_run(tmp_path, capsys):
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists()  # it does run when nobody minds
    mark.unlink()

    bomb = tmp_path / "ep0-ba1-rank0.pt"
    torch.save({"state": {"model": {}, "bomb": Bomb(mark)}}, bomb)
    assert "no checkpoint of plain data" in refused(
        capsys, "checkpoint", "convert", bomb, tmp_path / "out", "--to", "llmtrain"
    )

    folder = tmp_path / "sharded"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"state": {"model": {"model.embed.weight": torch.ones(2)}, "bomb": Bomb(mark)}},
            checkpoint_id=folder,
            no_dist=True,
        )
    original = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    assert "which no index holds" in refused(
        capsys, "checkpoint", "convert", folder, tmp_path / "out", "--to", "llmtrain"
    )
    index = pickle.loads(original)
    (folder / ".metadata").write_bytes(pickle.dumps(dataclasses.replace(index, planner_data=Bomb(mark))))
    assert "which no index holds" in refused(
        capsys, "checkpoint", "convert", folder, tmp_path / "out", "--to", "llmtrain"
    )
    assert not mark.exists() and not (tmp_path / "out").exists()


def save_with_composer(config: ModelConfig, out: Path, sharded: bool) -> dict[str, torch.Tensor]:
    """A job: Composer saves a model of ours by itself; the parameters it had."""
    from composer import Trainer
    from composer.utils import FSDP2Config

    from llmtrain.models.causal_lm import CausalLM
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.objectives.next_token import NextToken
    from llmtrain.train.composer_model import ComposerHybridLM

    model = HybridLM(config)
    model.init_weights(5)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    sharding: Any = {"fsdp": FSDP2Config(state_dict_type="sharded")} if sharded else None
    trainer = Trainer(
        model=ComposerHybridLM(CausalLM(model), NextToken()),
        optimizers=optimizer,
        parallelism_config=sharding,
        progress_bar=False,
    )
    trainer.save_checkpoint(str(out / "ep0-ba0-rank{rank}.pt"))
    trainer.close()
    return expected


@pytest.fixture
def model_yaml(shards, tmp_path) -> tuple[ModelConfig, Path]:
    config = tiny_config(shards, tmp_path / "run").model
    file = tmp_path / "model.yaml"
    file.write_text(json.dumps({"model": config.model_dump(mode="json")}))
    return config, file


def test_composers_file_of_our_model(ranks, model_yaml, tmp_path, capsys):
    config, file = model_yaml
    [expected] = ranks(1).run(save_with_composer, config, tmp_path, False)
    source = tmp_path / "ep0-ba0-rank0.pt"
    assert "--config FILE" in refused(capsys, "checkpoint", "convert", source, tmp_path / "out", "--to", "llmtrain")
    text = convert(capsys, "checkpoint", "convert", source, tmp_path / "out", "--to", "llmtrain", "--config", file)
    assert "weights alone" in text
    assert same(read(tmp_path / "out"), {f"model.{name}": value.reshape(-1) for name, value in expected.items()})
    assert ModelConfig.model_validate_json(json.dumps(manifests.read(tmp_path / "out").config["model"])) == config

    other = config.model_dump(mode="json") | {"d_model": 64}
    file.write_text(json.dumps({"model": other}))
    said = refused(capsys, "checkpoint", "convert", source, tmp_path / "no", "--to", "llmtrain", "--config", file)
    assert "embed.weight has shape [300, 32], expected [300, 64]" in said


def test_composers_folder_of_our_model(ranks, model_yaml, tmp_path, capsys):
    config, file = model_yaml
    [expected, _] = ranks(2).run(save_with_composer, config, tmp_path / "saved", True)
    [metadata] = (tmp_path / "saved").rglob(".metadata")
    convert(capsys, "checkpoint", "convert", metadata.parent, tmp_path / "out", "--to", "llmtrain", "--config", file)
    assert same(read(tmp_path / "out"), {f"model.{name}": value.reshape(-1) for name, value in expected.items()})


def save_hf_model_with_composer(out: Path, kind: str) -> dict[str, torch.Tensor]:
    """A job: an MPT as LLM Foundry names its tensors, or a model of its `hf_causal_lm`, in Composer's HuggingFaceModel."""
    from composer import Trainer
    from composer.models import HuggingFaceModel
    from transformers import AutoModelForCausalLM

    torch.manual_seed(4)
    inner = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    model = HuggingFaceModel(inner, use_logits=True, metrics=[], eval_metrics=[])
    trainer = Trainer(model=model, optimizers=torch.optim.AdamW(inner.parameters()), progress_bar=False)
    trainer.save_checkpoint(str(out / "ep0-ba0-rank{rank}.pt"))
    trainer.close()
    return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}


@pytest.mark.parametrize("kind", ["mpt", pytest.param("llama", marks=pytest.mark.ci)])
def test_composers_file_of_a_hugging_face_model_states_itself_what_it_is(ranks, tmp_path, capsys, kind):
    [expected] = ranks(1).run(save_hf_model_with_composer, tmp_path, kind)
    checkpoints.tokenizer().save(tmp_path / "tokenizer")
    options = ["--to", "hf", "--tokenizer", tmp_path / "tokenizer"]
    convert(capsys, "checkpoint", "convert", tmp_path / "ep0-ba0-rank0.pt", tmp_path / "hf", *options)
    published = open_hf_checkpoint(tmp_path / "hf")
    assert published.config["model_type"] == kind
    assert {name: published[name].tolist() for name in published} == {n: v.tolist() for n, v in expected.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ep0-ba0-rank0.pt", "hf", "tokenizer"]


def test_a_file_of_one_rank_among_several_is_refused(tmp_path, capsys):
    for rank in range(3):
        torch.save({"state": {"model": {"_flat_param": torch.ones(4)}}}, tmp_path / f"ep0-ba1-rank{rank}.pt")
    for rank in range(3):
        file = tmp_path / f"ep0-ba1-rank{rank}.pt"
        said = refused(capsys, "checkpoint", "convert", file, tmp_path / "out", "--to", "llmtrain")
        assert f"{file} is one rank's part of a checkpoint" in said and "state_dict_type: full" in said


FOUNDRY = {  # as of 0.22: a section of LLM Foundry's YAML, and the tensors of a layer beyond the six of every MPT
    "default": ({}, {"ffn.up_proj": (128, 32), "ffn.down_proj": (32, 128)}),
    "wide, of fewer heads, with norms": (
        {"expansion_ratio": 3, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "qk_ln": True}},
        {"ffn.up_proj": (96, 32), "ffn.down_proj": (32, 96), "attn.q_ln": (32,), "attn.k_ln": (16,)},
    ),
    "gated, without biases": (
        {
            "no_bias": True,
            "attn_config": {"rope": True},
            "tie_word_embeddings": False,
            "ffn_config": {"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 48},
        },
        {"ffn.gate_proj": (48, 32), "ffn.up_proj": (48, 32), "ffn.down_proj": (32, 48)},
    ),
}


APART = (
    {"fuse_norm_attn_norm": True, "attn_config": {"fused_qkv": False}},
    {"ffn.up_proj": (128, 32), "ffn.down_proj": (32, 128)},
)


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as LLM Foundry names them with `fused_qkv: false` and `fuse_norm_attn_norm: true`."""
    found = {}
    for name, value in tensors.items():
        inner = re.sub(r"(blocks\.\d+)\.(norm_1|attn|norm_2)\.", r"\1.norm_attn_norm.\2.", name)
        pieces = value.chunk(3) if "Wqkv" in name else [value]
        names = [inner.replace("Wqkv", one) for one in ("Wq", "Wk", "Wv")] if "Wqkv" in name else [inner]
        found |= dict(zip(names, pieces, strict=True))
    return found


def test_projections_apart_and_norms_in_one_module_are_read(tmp_path, capsys):
    section, tensors = foundry_checkpoint(*APART)
    config = {"model_type": "mpt", "architectures": ["MPTForCausalLM"], **section}
    for name, stored in (("together", tensors), ("apart", apart(tensors))):
        state = {"model": {f"model.{key}": value.clone() for key, value in stored.items()}}
        state["integrations"] = {"huggingface": {"model": {"config": {"content": config}}}}
        torch.save({"state": state, "rng": []}, tmp_path / f"{name}.pt")
        convert(capsys, "checkpoint", "convert", tmp_path / f"{name}.pt", tmp_path / name, "--to", "llmtrain")
    assert same(read(tmp_path / "together"), read(tmp_path / "apart"))


def foundry_checkpoint(
    changes: dict[str, Any], layer: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """LLM Foundry's `model` section of a model of two layers, and its tensors."""
    section = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 16, **changes}
    kv = 16 if "kv_n_heads" in section.get("attn_config", {}) else 32
    each = {"norm_1": (32,), "attn.Wqkv": (32 + 2 * kv, 32), "attn.out_proj": (32, 32), "norm_2": (32,), **layer}
    shapes = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in each.items()} | {"norm_f": (32,)}
    tensors = {f"transformer.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    if not section.get("no_bias"):
        tensors |= {f"transformer.{name}.bias": torch.randn(shape[0]) for name, shape in shapes.items()}
    if not section.get("attn_config", {}).get("rope"):
        tensors["transformer.wpe.weight"] = torch.randn(16, 32)
    tensors["transformer.wte.weight"] = torch.randn(64, 32)
    if section.get("tie_word_embeddings", True) is False:
        tensors["lm_head.weight"] = torch.randn(64, 32)
    return section, tensors


@pytest.mark.parametrize("form", ["file", "file with its config", "folder", "folder with its config", "Hugging Face"])
@pytest.mark.parametrize("case", FOUNDRY)
def test_forms_of_llm_foundrys_checkpoints(case, form, tmp_path, capsys):
    section, tensors = foundry_checkpoint(*FOUNDRY[case])
    state = {"model": {f"model.{name}": value for name, value in tensors.items()}}
    state["optimizers"] = {"AdamW": {"state": {name: {"exp_avg": torch.zeros(2)} for name in state["model"]}}}
    config = {"model_type": "mpt", "use_cache": False, "architectures": ["MPTForCausalLM"], **section}
    state["integrations"] = {"huggingface": {"model": {"config": {"content": config}}}} if "config" in form else {}
    source, options = tmp_path / "ep0-ba1-rank0.pt", []
    if form.startswith("file"):
        torch.save({"state": state, "rng": []}, source)
    elif form.startswith("folder"):
        dcp.save({"state": state}, checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(config))
    if form in ("file", "folder"):
        ours = foundry.migrated(tmp_path, {"max_seq_len": 16, "train_loader.dataset.max_seq_len": 16, "model": section})
        (tmp_path / "ours.yaml").write_text(ours.text)
        assert "${data.seq_len}" in ours.text
        options = ["--config", tmp_path / "ours.yaml"]
    convert(capsys, "checkpoint", "convert", source, tmp_path / "out", "--to", "llmtrain", *options)
    found = read(tmp_path / "out")
    assert sum(value.numel() for value in found.values()) == sum(value.numel() for value in tensors.values())
    first, theirs = "model.blocks.0", "transformer.blocks.0"
    assert torch.equal(found[f"{first}.mixer.wqkv.weight"], tensors[f"{theirs}.attn.Wqkv.weight"].reshape(-1))
    up = [
        tensors[f"{theirs}.ffn.{name}.weight"] for name in ("gate_proj", "up_proj") if f"ffn.{name}" in FOUNDRY[case][1]
    ]
    assert torch.equal(found[f"{first}.mlp.w_in.weight"], torch.cat(up).reshape(-1))
    for ours_name, name in (("positions", "wpe"), ("blocks.1.mixer.q_norm", "blocks.1.attn.q_ln")):
        if f"transformer.{name}.weight" in tensors:
            assert torch.equal(found[f"model.{ours_name}.weight"], tensors[f"transformer.{name}.weight"].reshape(-1))


def test_llm_foundrys_model_in_hugging_faces_format_names_the_command_that_reads_it(tmp_path, capsys):
    section, tensors = foundry_checkpoint({"expansion_ratio": 3}, {})
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt", **section}))
    assert "checkpoint convert FOLDER OUT --to llmtrain" in refused(capsys, "import", tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mpt", **section, "logit_scale": 0.5}))
    said = refused(capsys, "checkpoint", "convert", tmp_path, tmp_path / "out", "--to", "llmtrain")
    assert "logit_scale = 0.5: logits are not scaled" in said
