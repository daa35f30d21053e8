"""Checkpoint folders: formats, dtypes, what is refused, and names on the hub."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from llmtrain.convert.export import _pieces
from llmtrain.errors import UserError
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model
from llmtrain.models.hf.hf_checkpoint import find_hf_folder, open_hf_checkpoint
from llmtrain.models.hf.load import load_hf

CPU = platform.cpu()


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes, **changes))


@pytest.fixture
def folder(tmp_path) -> Path:
    """An untied Llama of one file."""
    llama().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, add: dict[str, torch.Tensor], drop: str | None = None) -> None:
    tensors = {name: t for name, t in load_file(folder / "model.safetensors").items() if name != drop}
    save_file(tensors | add, folder / "model.safetensors")


def values(folder: Path, **options) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in load_hf(folder, CPU, **options).named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_formats_give_the_same_model(folder, tmp_path_factory):
    """One file, several with an index, and torch.save's format in its zip, legacy and indexed forms."""
    expected = values(folder)
    state = load_file(folder / "model.safetensors")
    config = (folder / "config.json").read_text()

    sharded = tmp_path_factory.mktemp("sharded")
    llama().save_pretrained(sharded, max_shard_size="4KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert same(values(sharded), expected)

    for name, options in (("zip", {}), ("legacy", {"_use_new_zipfile_serialization": False})):
        pickled = tmp_path_factory.mktemp(name)
        (pickled / "config.json").write_text(config)
        torch.save(state, pickled / "pytorch_model.bin", **options)
        assert same(values(pickled), expected)

    indexed = tmp_path_factory.mktemp("indexed")
    (indexed / "config.json").write_text(config)
    names = sorted(state)
    files = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, held in files.items():
        torch.save({name: state[name] for name in held}, indexed / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (indexed / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(values(indexed), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_read_without_loss(folder, stored):
    state = {name: t.to(stored) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors")
    found = values(folder)
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert torch.equal(found["embed.weight"], state["model.embed_tokens.weight"].float())


def test_dtype(tmp_path):
    """Parameters in the dtype asked for, but for the recurrence's own."""
    config = Mamba2Config(vocab_size=40, hidden_size=16, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=2)
    Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_hf(tmp_path, CPU, dtype=torch.bfloat16)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {f"blocks.{i}.mixer.ssm.{name}" for i in range(2) for name in ("A_log", "D", "dt_bias")}
    assert not model.training and torch.isfinite(CausalLM(model).logits(torch.ones(1, 5, dtype=torch.long))).all()


def test_published_reads_headers_only(folder, monkeypatch):
    published = open_hf_checkpoint(folder)
    monkeypatch.setattr(type(published), "__getitem__", None)
    assert "model.norm.weight" in published and "model.norm" not in published and len(published) == 21
    assert published.shape("model.norm.weight") == (16,) and published.dtype("model.norm.weight") == torch.float32
    assert published.file("lm_head.weight") == folder / "model.safetensors"


def test_harmless_buffers_and_tied_copies_are_passed_over(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    expected = values(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change(tmp_path, inverse | {"lm_head.weight": embedding.clone()})
    assert same(values(tmp_path), expected)
    change(tmp_path, {}, drop="model.embed_tokens.weight")  # the copy will do
    assert same(values(tmp_path), expected)


def test_a_tied_copy_that_differs_is_refused(tmp_path):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, {"lm_head.weight": torch.ones(40, 16)})
    with pytest.raises(ValueError, match=r"embed_tokens.weight and lm_head.weight differ.*tie_word_embeddings: false"):
        load_hf(tmp_path, CPU)


def test_tensors_that_do_not_fit_are_all_named(folder):
    change(
        folder,
        {
            "model.layers.0.self_attn.q_proj.bias": torch.ones(16),
            "lm_head.weight": torch.ones(40, 15),
            "model.layers.1.mlp.up_proj.weight": torch.ones(24, 16, dtype=torch.int8),
        },
        drop="model.norm.weight",
    )
    with pytest.raises(ValueError) as caught:
        load_hf(folder, CPU)
    text = str(caught.value)
    assert "tensor model.norm.weight [16] is missing" in text
    assert "model.safetensors: tensor lm_head.weight has shape [40, 15], expected [40, 16]" in text
    assert "model.safetensors: tensor model.layers.1.mlp.up_proj.weight is stored as torch.int8" in text
    assert "model.safetensors: tensor model.layers.0.self_attn.q_proj.bias has no place" in text


def test_folders_that_cannot_be_read(tmp_path, folder, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_hf(empty)
    (empty / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_hf(empty)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no weights: no model\.safetensors, no pytorch_model\.bin"):
        load_hf(empty)
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(ValueError, match=r"1 shards that are missing: x\.safetensors"):
        load_hf(empty)
    save_file({"b": torch.ones(1)}, empty / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors does not hold tensor a"):
        load_hf(empty)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_hf(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
        load_hf(folder)


def test_resolve_local(tmp_path):
    assert find_hf_folder(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="no such folder"):
        find_hf_folder(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a file; name the folder"):
        find_hf_folder(tmp_path / "config.json")


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_resolve_prefers_safetensors(tmp_path, monkeypatch, format):
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if format == "safetensors":
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert find_hf_folder("someone/something") == tmp_path
    assert len(asked) == (1 if format == "safetensors" else 2)
    assert "pytorch_model*.bin" not in asked[0]
    assert ("pytorch_model*.bin" in asked[-1]) == (format == "bin")


def test_resolve_explains_what_to_do_without_the_hub(monkeypatch):
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(
        ValueError, match=r"did not give it \(ConnectionError\).*hf download someone/something --local-dir"
    ):
        find_hf_folder("someone/something")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="neither a folder nor a name"):
        find_hf_folder("not a name")


def test_rejects_a_bin_of_a_list(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds a list, not tensors by name"):
        open_hf_checkpoint(tmp_path)


def test_constants_of_a_class_are_exported_and_others_refused():
    """Apertus' files hold two numbers of its activation that are the same in all of them."""
    mlp = {"type": "xielu", "d_ff": 24}
    block = {"type": "attention", "n_heads": 2, "qk_norm": "head", "position": {"type": "rotary"}, "mlp": mlp}
    config = ModelConfig.model_validate({"vocab_size": 61, "d_model": 16, "blocks": {"a": block}, "layers": "a"})
    weights = family_for_model(config).weights(config)
    (weight,) = (one for one in weights if one.ours.endswith("alpha_n"))

    class Reader:
        def shape(self, name: str) -> tuple[int, ...]:
            return weight.shape

        def elements(self, name: str, counts: list[int]):
            return iter(torch.tensor([-0.5]).split(counts))

    found = dict(_pieces(Reader(), [weight]))  # type: ignore[arg-type]
    tensors = {part.name: found[part.name].reshape(part.shape) for part in weight.parts}
    values = {name.rpartition(".")[2]: value.item() for name, value in tensors.items()}
    assert values == pytest.approx({"alpha_n": -0.5, "beta": 0.5, "eps": -1e-6})
    assert weight.join(tensors) == torch.tensor([-0.5])
    with pytest.raises(UserError, match=r"beta is 0\.25; there is only 0\.5"):
        weight.join(tensors | {"model.layers.0.mlp.act_fn.beta": torch.tensor(0.25)})
