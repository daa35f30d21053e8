"""A folder in Hugging Face format cannot run code: it is refused, without a question, in our own words."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from llmtrain.data.tokenize.tokenizer import TokenizerError, load_tokenizer
from llmtrain.errors import UserError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.scoring.huggingface import load_huggingface, window_of_config
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint
from tests.support.conversion import publish
from tests.support.pickled import Bomb

ADVICE = ("trust_remote_code", "weights_only", "add_safe_globals", "[y/N]")


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch):
    def asked(prompt: object = "") -> str:
        raise AssertionError(f"asked: {prompt}")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture
def mark(tmp_path) -> Path:
    """A file that appears when code of the folder is run."""
    return tmp_path / "was-run"


def of_its_own(folder: Path, mark: Path) -> Path:
    """A folder whose model, config and tokenizer are classes in its own Python file."""
    folder.mkdir()
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Slow", None]}
    (folder / "config.json").write_text(json.dumps({"model_type": "its-own", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Slow", "auto_map": classes}))
    return folder


def test_python_files_of_a_folder_are_not_run(tmp_path, mark):
    folder = of_its_own(tmp_path / "model", mark)
    actions = [
        lambda: load_huggingface(folder, torch.float32, torch.device("cpu")),
        lambda: window_of_config(folder),
        lambda: load_tokenizer(folder),
    ]
    for action in actions:
        with pytest.raises((EvalError, TokenizerError), match=r"Python code of its own \(auto_map\)") as caught:
            action()
        assert not any(advice in str(caught.value) for advice in ADVICE)
    assert not mark.exists()


def test_a_known_model_with_an_auto_map_is_read_by_transformers_own_class(tmp_path, mark):
    folder = publish(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\n")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}))
    model = load_huggingface(folder, torch.float32, torch.device("cpu"))
    assert type(model).__module__.startswith("transformers.models.") and not mark.exists()


def test_kernels_of_the_hub_are_not_fetched(tmp_path):
    folder = publish(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "someone/attention"}))
    with pytest.raises(EvalError, match="asks for the code of someone/attention on the hub"):
        load_huggingface(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["zip", "pickle", "text", "empty"])
def test_a_bad_bin_is_refused_in_our_own_words(tmp_path, mark, kind):
    folder = publish(tmp_path / "model", "llama")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    weights = folder / "pytorch_model.bin"
    if kind == "zip":
        torch.save({"bomb": Bomb(mark)}, weights)
    else:
        weights.write_bytes({"pickle": pickle.dumps(Bomb(mark)), "text": b"no weights", "empty": b""}[kind])
    for action in (
        lambda: open_hf_checkpoint(folder),
        lambda: load_huggingface(folder, torch.float32, torch.device("cpu")),
    ):
        with pytest.raises(UserError) as caught:
            action()
        said = str(caught.value)
        assert str(folder) in said and not any(advice in said for advice in ADVICE), said
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "..", 3])
def test_an_index_of_weights_cannot_leave_its_folder(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="which is no file in its folder"):
        open_hf_checkpoint(tmp_path)
