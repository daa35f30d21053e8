"""`llmtrain export` and `llmtrain import`: there and back without losing a bit, whole or not at all, or a plain word why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    Zamba2Config,
)

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import store
from llmtrain.cli import main
from llmtrain.data.tokenizer import load_tokenizer
from llmtrain.generate.load import load_model
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.published import open_published
from tests.support import checkpoints
from tests.support.project import LLMTRAIN, copy_of, stop
from tests.support.runs import read_tensors

TEXT = "the quick brown fox, toxic brew — and “ünïcode”\n\tfor 7 queens  "


def convert(capsys, *arguments: object) -> str:
    """Runs a command that must succeed; what it printed."""
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: object) -> str:
    """Runs a command that must be refused; what it said."""
    capsys.readouterr()  # transformers shows its progress
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "llama, tied": lambda: LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=True,
    ),
    "mpt": lambda: MptConfig(vocab_size=300, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
    "mamba2": lambda: Mamba2Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        n_groups=1,
        state_size=8,
        chunk_size=16,
    ),
    "zamba2": lambda: Zamba2Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_attention_heads=4,
        intermediate_size=48,
        mamba_d_state=8,
        mamba_headdim=16,
        n_mamba_heads=4,
        mamba_ngroups=1,
        num_mem_blocks=2,
        adapter_rank=4,
        use_mem_rope=True,
        chunk_size=16,
    ),
}


def publish(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model as transformers saves it, with a tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    model.save_pretrained(folder)
    checkpoints.tokenizer().save(folder)
    return folder


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = open_published(found), open_published(expected)
    assert set(ours) == set(theirs)
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype, name
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_import_then_export_gives_the_same_bits(kind, dtype, tmp_path, capsys):
    source = publish(tmp_path / "source", kind, dtype)
    name = str(dtype).removeprefix("torch.")
    printed = convert(capsys, "import", source, tmp_path / "checkpoint")
    assert f"init_from: {tmp_path / 'checkpoint'}" in printed and len(printed.splitlines()) == 1
    sharded = ["--max-shard-size", "20KB", "--dtype", name]
    printed = convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "out", *sharded)
    assert f"{name}, " in printed and f"from_pretrained('{tmp_path / 'out'}')" in printed
    assert_same_tensors(tmp_path / "out", source)
    assert len(list((tmp_path / "out").glob("model-0*.safetensors"))) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out", "source"]

    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()) and model.dtype == dtype
    # As it was saved by transformers once more, it comes in again with the same bits.
    model.save_pretrained(tmp_path / "again")
    convert(capsys, "import", tmp_path / "again", tmp_path / "twice")
    assert_same_checkpoints(tmp_path / "checkpoint", tmp_path / "twice")


def assert_same_checkpoints(one: Path, other: Path) -> None:
    a, b = (read_tensors(folder, folder.parent / "scratch")["model"] for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == torch.float32 for name in a)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_imported_is_a_checkpoint(kind, tmp_path, capsys):
    source = publish(tmp_path / "source", kind)
    convert(capsys, "import", source, tmp_path / "checkpoint")
    written = manifests.read(tmp_path / "checkpoint")
    assert (written.step, written.tokens) == (0, 0)
    section = yaml.safe_load((tmp_path / "checkpoint" / "model.yaml").read_text())["model"]
    assert ModelConfig.model_validate_json(json.dumps(section)).model_dump(mode="json") == written.config["model"]

    model, tokenizer = load_model(str(tmp_path / "checkpoint"))
    assert tokenizer.encode(TEXT) == load_tokenizer(source).encode(TEXT)
    peer: Any = AutoModelForCausalLM.from_pretrained(source)
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.cpu()(ids), peer.eval()(ids).logits, atol=1e-4, rtol=1e-4)
    text = convert(capsys, "generate", tmp_path / "checkpoint", "--prompt", "the", "--max-new-tokens", 4)
    assert text.startswith("the")


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    assert main(["export", str(finished[0].run_dir), str(out)]) == 0
    return out


def test_a_run_is_exported_whole(exported, finished):
    names = {path.name for path in exported.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "generation_config.json", "model.safetensors", *tokenizer}
    assert [path.name for path in exported.parent.iterdir()] == ["out"]

    ours, text = load_model(str(finished[0].run_dir))
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == "float32" and config["vocab_size"] == ours.config.vocab_size
    assert config["eos_token_id"] == text.eod_id and config["bos_token_id"] is None
    generation = GenerationConfig.from_pretrained(exported)
    generation.validate(strict=True)
    assert (generation.eos_token_id, generation.pad_token_id) == (text.eod_id, text.eod_id)

    theirs = AutoTokenizer.from_pretrained(exported)
    assert theirs.encode(TEXT) == text.encode(TEXT) and theirs.decode(theirs.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == text.eod_id
    peer: Any
    peer, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values())
    ids = torch.tensor([text.encode("the quick brown fox jumps over")])
    with torch.no_grad():
        torch.testing.assert_close(ours.cpu()(ids), peer.eval()(ids).logits, atol=1e-4, rtol=1e-4)


def greedy(folder: Path, capsys) -> str:
    arguments = ["--prompt", "the quick", "--temperature", 0, "--max-new-tokens", 12]
    return convert(capsys, "generate", folder, *arguments)


def test_run_export_and_import_of_it_generate_the_same(exported, finished, tmp_path, capsys):
    convert(capsys, "import", exported, tmp_path / "imported")
    texts = {greedy(folder, capsys) for folder in (finished[0].run_dir, exported, tmp_path / "imported")}
    assert len(texts) == 1


def test_checkpoints_of_one_and_of_two_ranks_are_exported_alike(ranks, shards, tmp_path, capsys):
    for size in (1, 2):
        ranks(size).run(_save, shards, tmp_path / f"ranks{size}")
        convert(capsys, "export", tmp_path / f"ranks{size}" / "step-00000003", tmp_path / f"out{size}")
    one, two = (open_published(tmp_path / f"out{size}") for size in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one) and set(one) == set(two)


def _save(shards: Path, root: Path) -> None:
    """A job: a sharded model with a seed, saved. Its tokenizer is found through the config."""
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.train.distributed import world_from_environment
    from llmtrain.train.optim import build_optimizer
    from llmtrain.train.parallel import parallelize
    from tests.support.tiny import tiny_config

    config = tiny_config(shards, root / "run")
    with torch.device("meta"):
        model = HybridLM(config.model)
    parallelize(model, config.train, world_from_environment(), torch.device("cpu"))
    model.init_weights(1)
    optimizer = build_optimizer(model, config.optimizer)
    model(torch.arange(32)[None], torch.arange(32)[None]).loss.backward()
    optimizer.step()
    model.init_weights(1)  # the step has rounded differently on two ranks
    written = config.model_dump(mode="json")
    store.save(root, model, optimizer, step=3, tokens=0, config=written, clock={}, data={}, keep_last=None)


def test_ranks_load_what_is_imported(ranks, tmp_path, capsys):
    source = publish(tmp_path / "source", "zamba2")
    convert(capsys, "import", source, tmp_path / "checkpoint")
    expected = read_tensors(tmp_path / "checkpoint", tmp_path / "scratch")["model"]
    for found in ranks(2).run(_load, tmp_path / "checkpoint"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """A job: the parameters of a checkpoint, loaded into a sharded model."""
    from llmtrain.models.hybrid import HybridLM
    from llmtrain.train.distributed import world_from_environment
    from llmtrain.train.parallel import parallelize
    from tests.support.tiny import tiny_config

    with torch.device("meta"):
        model = HybridLM(ModelConfig.model_validate_json(json.dumps(manifests.read(folder).config["model"])))
    parallelize(model, tiny_config(folder, folder).train, world_from_environment(), torch.device("cpu"))
    store.load(folder, model)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


ALONE = """
import sys

class Absent:
    # What a user of the export need not have.
    names = {"llmtrain", "composer", "streaming", "omegaconf", "pydantic", "triton", "wandb", "matplotlib", "mamba_ssm"}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

LOADS = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("the quick", return_tensors="pt")
out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(out[0]))
"""


def without_us(folder: Path, python: str, program: str, **environment: str) -> str:
    done = subprocess.run(
        [python, "-c", program, str(folder)],
        cwd=folder.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_transformers_alone_loads_the_export_and_generates_the_same(exported, finished, capsys):
    text = without_us(exported, sys.executable, ALONE + LOADS)
    assert text == greedy(finished[0].run_dir, capsys)


@pytest.mark.slow
def test_a_fresh_environment_loads_the_export(exported, finished, tmp_path, capsys):
    """Of nothing but transformers and torch, from uv's cache where it has them."""
    import importlib.metadata

    versions = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(["uv", "venv", "--python", sys.executable, tmp_path / "venv"], check=True, timeout=60)
    subprocess.run(["uv", "pip", "install", "--python", python, *versions, "numpy"], check=True, timeout=900)
    assert without_us(exported, str(python), LOADS) == greedy(finished[0].run_dir, capsys)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint of 300 MB."""
    return checkpoints.save(tmp_path_factory.mktemp("large") / "checkpoint", checkpoints.mpt(768, 8, 25_000))


def test_a_killed_export_leaves_nothing_under_the_name_and_the_next_one_succeeds(large, tmp_path, capsys):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    process = subprocess.Popen([*LLMTRAIN, "export", str(large), str(out), "--max-shard-size", "10MB"], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(list(partial.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        stop(process, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    (partial / "stale").touch()
    convert(capsys, "export", large, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (out / "stale").exists()
    found = open_published(out)
    expected = read_tensors(large, tmp_path / "scratch")["model"]
    assert torch.equal(found["transformer.wte.weight"], expected["embed.weight"])


def test_an_unsupported_model_is_refused_by_its_feature_before_any_weight_is_read(tmp_path, capsys):
    config = checkpoints.mpt(32, 2, 300)
    folder = checkpoints.save(tmp_path / "checkpoint", config)
    for shard in folder.glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    edit_manifest(folder, lambda model: model["blocks"]["attn"].update(softcap=30.0))
    said = refused(capsys, "export", folder, tmp_path / "out")
    assert "MptForCausalLM: model.blocks.attn.softcap = 30.0" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def edit_manifest(folder: Path, change: Any) -> None:
    file = folder / manifests.NAME
    content = json.loads(file.read_text())
    change(content["config"]["model"])
    file.write_text(json.dumps(content))


@pytest.fixture
def small(tmp_path) -> Path:
    return checkpoints.save(tmp_path / "checkpoint", checkpoints.mpt(32, 2, 300))


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
        (lambda path: path.mkdir(), "holds no complete checkpoint"),
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
    [shard] = small.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 16
    shard.write_bytes(content)
    assert "is damaged: tensor model." in refused(capsys, "export", small, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_disk_space_is_told_before_anything_is_written(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    publish(tmp_path / "source", "mpt")
    for arguments in (["export", small], ["import", tmp_path / "source"]):
        said = refused(capsys, *arguments, tmp_path / "out")
        assert f"{tmp_path / 'out'} needs" in said and f"{tmp_path} has 1 kB free" in said
    assert not (tmp_path / "out.partial").exists()


def test_the_tokenizer_must_be_there_and_fit(small, tmp_path, capsys):
    edit_manifest(small, lambda model: model.update(vocab_size=269))
    said = refused(capsys, "export", small, tmp_path / "out")
    assert "the tokenizer has 270 tokens, the model 269" in said and "--tokenizer" in said
    edit_manifest(small, lambda model: model.update(vocab_size=300))
    (small / "tokenizer").rename(tmp_path / "elsewhere")
    assert "name one with --tokenizer" in refused(capsys, "export", small, tmp_path / "out")
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


def test_a_source_without_tokenizer_is_imported_with_a_word(tmp_path, capsys):
    source = publish(tmp_path / "source", "mpt")
    for file in source.glob("tokenizer*"):
        file.unlink()
    assert main(["import", str(source), str(tmp_path / "out")]) == 0
    assert "has no tokenizer" in capsys.readouterr().err
    assert "was imported without a tokenizer" in refused(capsys, "export", tmp_path / "out", tmp_path / "again")


def test_a_newest_checkpoint_that_is_not_whole_is_passed_over_with_a_word(finished, tmp_path, capsys):
    run = copy_of(finished, tmp_path).run_dir
    (run / "checkpoints" / "step-00000099").mkdir()
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "step-00000099 is not a complete checkpoint" in captured.err and "step-00000006 ->" in captured.out


@pytest.mark.parametrize("command", ["export", "import"])
def test_the_commands_are_parsed_and_refused_without_torch(command, tmp_path):
    program = (
        "import sys\nfrom llmtrain.cli import main\nstatus = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    (tmp_path / "out").touch()
    done = subprocess.run([sys.executable, "-c", program, command, "x", "out"], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 2


def test_a_size_that_is_none_is_refused(tmp_path, capsys):
    said = refused(capsys, "export", tmp_path, tmp_path / "out", "--max-shard-size", "large")
    assert "--max-shard-size large: expected a size such as 5GB" in said
