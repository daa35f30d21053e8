"""benchmarks serving: figures, and a tiny model beside a vLLM that is made up."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from benchmarks.programs.models import serving
from llmtrain.models.hf.hf_checkpoint import open_hf_checkpoint

ROOT = Path(__file__).parents[2]

FAKE = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize): self.new = max_tokens
class LLM:
    def __init__(self, model, **options):
        if options["max_num_seqs"] > 4: raise SystemExit("too many")
    def generate(self, prompts, options, use_tqdm):
        row = type("Row", (), {"token_ids": [7] * options.new})
        return [type("Output", (), {"outputs": [row]}) for _ in prompts]
"""


def test_figures_of_a_request():
    ours = [{"batch": 4, "first": 0.2, "whole": 1.2, "tokens": [[1, 2], [3, 4]]}]
    theirs = [{"batch": 4, "first": 0.1, "whole": 0.6, "tokens": [[1, 2], [3, 5]]}]
    made = serving.figures({"llmtrain": ours, "vllm": theirs}, new=11, same=8)
    assert made["llmtrain"] == [
        {"batch": 4, "tokens_per_second": pytest.approx(44 / 1.2), "first_ms": 200, "further_ms": 100}
    ]
    assert made["same"] == 0.5 and "same" not in serving.figures({"llmtrain": ours}, new=11, same=8)


def test_a_program_that_fails_is_reported_with_the_end_of_its_output(tmp_path):
    fails = "import sys; print('MEASURED {}'); sys.stderr.write('out of memory'); sys.exit(3)"
    with pytest.raises(serving.RunError, match=r"status 3 after 1 of 2 batches\n(MEASURED {}\n)?out of memory"):
        serving.measured([sys.executable, "-c", fails], {"batch": [1, 2]}, tmp_path / "one", 60)


def test_the_model_of_a_yaml_is_exported(tmp_path):
    sizes = ["model.layers=m", "model.d_model=16", "model.vocab_size=300", "model.blocks.m.head_dim=8"]
    args = argparse.Namespace(out=tmp_path, set=sizes, dtype="bfloat16")
    folder = serving.folder_of(ROOT / "yamls/pretrain/mamba2-130m.yaml", args)
    weight = open_hf_checkpoint(folder)["backbone.layers.0.mixer.out_proj.weight"]
    assert weight.shape == (16, 32) and weight.dtype == torch.bfloat16 and weight.std() > 0


@pytest.mark.slow
def test_a_tiny_model_beside_a_made_up_vllm(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 8,
        "num_hidden_layers": 2,
    }
    Mamba2ForCausalLM(Mamba2Config(vocab_size=64, **sizes)).save_pretrained(tmp_path / "exported")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "vllm.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}:{serving.Path.cwd()}")
    options = [*("--prompt", "9", "--new", "5", "--dtype", "float32"), "--vllm", sys.executable]
    options += ["--out", str(tmp_path / "out")]
    assert serving.main([str(tmp_path / "exported"), "--batch", "1", "3", *options]) == 0
    (found,) = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert [row["batch"] for row in found["llmtrain"]] == [row["batch"] for row in found["vllm"]] == [1, 3]
    assert 0 <= found["same"] < 1 and (tmp_path / "out" / "serving.png").read_bytes().startswith(b"\x89PNG")
    assert serving.main([str(tmp_path / "exported"), "--batch", "5", *options]) == 1
    (found,) = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert "llmtrain" in found and "vllm" not in found


def test_a_model_that_no_program_serves_is_no_end(tmp_path, monkeypatch):
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "config.json").write_text('{"vocab_size": 9}')
    monkeypatch.setattr(serving, "_OURS", "raise SystemExit(1)")
    assert serving.main([str(tmp_path / "exported"), "--out", str(tmp_path / "out")]) == 1
    (found,) = json.loads((tmp_path / "out" / "serving.json").read_text())
    assert "llmtrain" not in found and not (tmp_path / "out" / "serving.png").exists()


def test_a_dot_in_a_folders_name_ends_nothing(tmp_path):
    for name in ("x-1.2b", "x-1.3b"):
        (tmp_path / name).mkdir()
    assert [serving.title(tmp_path / name) for name in ("x-1.2b", "x-1.3b")] == ["x-1.2b", "x-1.3b"]
    assert serving.title(Path("yamls/pretrain/zamba2-1.2b.yaml")) == "zamba2-1.2b"
