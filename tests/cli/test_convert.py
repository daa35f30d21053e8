"""`llmtrain export` and `llmtrain import`: there and back without losing a bit, whole or not at all."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.cli import main
from llmtrain.convert import export
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.generate.load import load_model
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from llmtrain.models.hybrid import HybridLM
from tests.support import checkpoints
from tests.support.conversion import CONFIGS, convert, publish
from tests.support.processes import output_of
from tests.support.runs import read_tensors
from tests.support.sharded import write

TEXT = "the quick brown fox, toxic brew — and “ünïcode”\n\tfor 7 queens  "


def from_pretrained(folder: Path) -> Any:
    """The model; every tensor has found its place."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(model[1].values()), model[1]
    return model[0].eval()


def assert_same_logits(ours: CausalLM, theirs: Any, ids: list[int]) -> None:
    with torch.no_grad():
        found = ours.logits(torch.tensor([ids], device=ours.device))
        torch.testing.assert_close(found.cpu(), theirs(torch.tensor([ids])).logits, atol=1e-4, rtol=1e-4)


def assert_same_tensors(found: Path, expected: Path) -> None:
    ours, theirs = open_hf_checkpoint(found), open_hf_checkpoint(expected)
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

    model = from_pretrained(tmp_path / "out")
    assert model.dtype == dtype
    # As it was saved by transformers once more, it comes in again with the same bits.
    model.save_pretrained(tmp_path / "again")
    convert(capsys, "import", tmp_path / "again", tmp_path / "twice")
    assert_same_checkpoints(tmp_path / "checkpoint", tmp_path / "twice")


def assert_same_checkpoints(one: Path, other: Path) -> None:
    a, b = (read_tensors(folder) for folder in (one, other))
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

    model, tokenizer = load_model(str(tmp_path / "checkpoint"), torch.float32)
    assert tokenizer.encode(TEXT) == load_tokenizer(source).encode(TEXT)
    assert_same_logits(model, from_pretrained(source), list(range(1, 40)))
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

    ours, text = load_model(str(finished[0].run_dir), torch.float32)
    config = json.loads((exported / "config.json").read_text())
    assert config["dtype"] == "float32" and config["vocab_size"] == ours.config.vocab_size
    assert config["eos_token_id"] == text.eod_id and config["bos_token_id"] is None
    generation = GenerationConfig.from_pretrained(exported)
    generation.validate(strict=True)
    assert (generation.eos_token_id, generation.pad_token_id) == (text.eod_id, text.eod_id)

    theirs = AutoTokenizer.from_pretrained(exported)
    assert theirs.encode(TEXT) == text.encode(TEXT) and theirs.decode(theirs.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == text.eod_id
    assert_same_logits(ours, from_pretrained(exported), text.encode("the quick brown fox jumps over"))


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
    one, two = (open_hf_checkpoint(tmp_path / f"out{size}") for size in (1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one) and set(one) == set(two)


def _save(shards: Path, root: Path) -> None:
    """A job: a sharded model with a seed, saved. Its tokenizer is found through the config."""
    from llmtrain.distributed.world import world_from_environment
    from llmtrain.train.optim import build_optimizer
    from llmtrain.train.parallel import parallelize
    from tests.support.tiny import tiny_config

    config = tiny_config(shards, root / "run")
    with torch.device("meta"):
        model = HybridLM(config.model)
    causal_lm = CausalLM(model)
    parallelize(causal_lm, config.train, world_from_environment(), torch.device("cpu"))
    model.init_weights(1)
    optimizer = build_optimizer(model, config.optimizer)
    causal_lm.loss(torch.arange(32)[None], torch.arange(32)[None]).loss.backward()
    optimizer.step()
    model.init_weights(1)  # the step has rounded differently on two ranks
    written = config.model_dump(mode="json")
    write(root, model, optimizer, 3, config=written)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder).items()}


def test_ranks_load_what_is_imported(ranks, tmp_path, capsys):
    source = publish(tmp_path / "source", "zamba2")
    convert(capsys, "import", source, tmp_path / "checkpoint")
    expected = parameters(tmp_path / "checkpoint")
    for found in ranks(2).run(_load, tmp_path / "checkpoint"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _load(folder: Path) -> dict[str, torch.Tensor]:
    """A job: the parameters of a checkpoint, loaded into a sharded model."""
    from llmtrain.distributed.world import world_from_environment
    from llmtrain.train.parallel import parallelize
    from tests.support.tiny import tiny_config

    with torch.device("meta"):
        model = HybridLM(ModelConfig.model_validate_json(json.dumps(manifests.read(folder).config["model"])))
    parallelize(CausalLM(model), tiny_config(folder, folder).train, world_from_environment(), torch.device("cpu"))
    save_load.load(folder, model)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


ALONE = """
import sys
from importlib.machinery import PathFinder

# What a user of the export need not have: all that we bring beside transformers and torch.
ABSENT = {"llmtrain", "composer", "streaming", "omegaconf", "pydantic", "triton", "wandb", "matplotlib", "mamba_ssm"}
ABSENT |= {"lm_eval", "accelerate", "datasets", "evaluate", "sklearn", "scipy", "pandas"}

class Others(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

sys.meta_path = [Others if finder is PathFinder else finder for finder in sys.meta_path]
try:
    import llmtrain
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("llmtrain is there")
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


def without_us(folder: Path, python: str, program: str) -> str:
    return output_of(python, "-c", program, str(folder), cwd=folder.parent, HF_HUB_OFFLINE="1")


def test_transformers_alone_loads_the_export_and_generates_the_same(exported, finished, capsys):
    text = without_us(exported, sys.executable, ALONE + LOADS)
    assert text == greedy(finished[0].run_dir, capsys)


@pytest.mark.slow
def test_a_fresh_environment_loads_the_export(exported, finished, tmp_path, capsys):
    """An environment with nothing but transformers and torch, from uv's cache where it has them."""
    import importlib.metadata

    versions = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(["uv", "venv", "--python", sys.executable, tmp_path / "venv"], check=True, timeout=60)
    subprocess.run(["uv", "pip", "install", "--python", python, *versions, "numpy"], check=True, timeout=900)
    assert without_us(exported, str(python), LOADS) == greedy(finished[0].run_dir, capsys)


def export_and_be_killed(checkpoint: Path, out: Path) -> None:
    """A process: an export whose third file is half written when it is killed."""
    write = export._write_shard

    def killed(path: Path, *rest: Any) -> None:
        if "model-00003" not in path.name:
            return write(path, *rest)
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    export._write_shard = killed
    main(["export", str(checkpoint), str(out), "--max-shard-size", "20KB"])


def test_a_killed_export_leaves_nothing_under_the_name_and_the_next_one_succeeds(tmp_path, capsys):
    folder, out = tmp_path / "folder", tmp_path / "folder" / "out"
    folder.mkdir()
    checkpoint = checkpoints.save(tmp_path / "checkpoint", checkpoints.mpt(32, 2, 300))
    process = get_context("fork").Process(target=export_and_be_killed, args=(checkpoint, out))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == ["out.partial"]
    assert len(list((folder / "out.partial").glob("*.safetensors"))) == 3
    (folder / "out.partial" / "stale").touch()
    convert(capsys, "export", checkpoint, out)
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert not (out / "stale").exists()
    assert torch.equal(open_hf_checkpoint(out)["transformer.wte.weight"], parameters(checkpoint)["embed.weight"])


@pytest.mark.parametrize("kind", ["llama", "llama, tied", "nemotron_h"])
def test_padding_of_the_vocabulary_is_exported_or_left_out(kind, tmp_path, capsys):
    """The tokenizer has 270 tokens, embedding and head have 300 rows."""
    publish(tmp_path / "source", kind)
    convert(capsys, "import", tmp_path / "source", tmp_path / "checkpoint")
    printed = convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "padded")
    assert "rows of padding" not in printed
    assert_same_tensors(tmp_path / "padded", tmp_path / "source")
    printed = convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "trimmed", "--trim-vocab")
    assert "ForCausalLM without 30 rows of padding, " in printed
    whole, trimmed = (open_hf_checkpoint(tmp_path / name) for name in ("source", "trimmed"))
    assert trimmed.config["vocab_size"] == 270 and whole.config["vocab_size"] == 300
    assert set(trimmed) == set(whole)
    assert all(
        torch.equal(trimmed[name], whole[name][:270] if whole.shape(name)[0] == 300 else whole[name]) for name in whole
    )

    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        logits, padded = (from_pretrained(tmp_path / name)(ids).logits for name in ("trimmed", "source"))
    torch.testing.assert_close(logits, padded[..., :270])
    # A model without padding comes in and goes out as it is.
    convert(capsys, "import", tmp_path / "trimmed", tmp_path / "again")
    printed = convert(capsys, "export", tmp_path / "again", tmp_path / "out", "--trim-vocab")
    assert "rows of padding" not in printed
    assert_same_tensors(tmp_path / "out", tmp_path / "trimmed")


def test_what_a_chat_needs_goes_through_import_and_export(tmp_path, capsys):
    """Several chat templates, the tokens that end an answer, and how it is sampled."""
    source = publish(tmp_path / "source", "llama")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|eot|>", "<|eom|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text("A")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("B")
    ends = [tokenizer.token_to_id("<|eot|>"), tokenizer.token_to_id("<|eom|>")]
    sampled = {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    # 3 is a byte of text, which ends nothing; 5000 has no row.
    published = sampled | {"eos_token_id": [3, *ends, 5000], "bos_token_id": 7, "transformers_version": "4.0"}
    (source / "generation_config.json").write_text(json.dumps(published))
    convert(capsys, "import", source, tmp_path / "checkpoint")
    convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == {"default": "A", "tool_use": "B"}
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == sampled | {"eos_token_id": [0, *ends], "pad_token_id": 0}
    (source / "generation_config.json").write_text("{")
    assert main(["import", str(source), str(tmp_path / "other")]) == 2
    assert "generation_config.json is not JSON" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_special_tokens_beyond_the_rows_of_the_embedding_are_no_hindrance(tmp_path, capsys):
    """As Gemma 3 has one for images: text never becomes it."""
    source = publish(tmp_path / "source", "llama")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|{i}|>" for i in range(31)])  # 270 and these, beside 300 rows
    tokenizer.save(str(source / "tokenizer.json"))
    convert(capsys, "import", source, tmp_path / "checkpoint")
    printed = convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "out", "--trim-vocab")
    assert "rows of padding" not in printed
    assert_same_tensors(tmp_path / "out", source)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 301


def test_a_chat_template_goes_through_import_and_export(tmp_path, capsys):
    source = publish(tmp_path / "source", "llama")
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    (source / "chat_template.jinja").write_text(template)
    convert(capsys, "import", source, tmp_path / "checkpoint")
    convert(capsys, "export", tmp_path / "checkpoint", tmp_path / "out")
    chat = [{"role": "user", "content": "the quick"}]
    text = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>the quick\n"
