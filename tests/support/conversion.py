"""Running `llmtrain export` and `import`, and small models as transformers publishes them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.cli import main
from tests.support import checkpoints


def convert(capsys, *arguments: object) -> str:
    """Run a command that must succeed; return its output."""
    assert main([str(argument) for argument in arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: object) -> str:
    """Run a command that must be refused; return its error."""
    capsys.readouterr()  # transformers shows its progress
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MAMBA = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 16}
_ZAMBA = {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "num_mem_blocks": 2, "adapter_rank": 4}
_NEMOTRON = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
_NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16}
_KEYS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"num_key_value_heads": 2},
    "llama, tied": _LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": True},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2} | _MAMBA,
    "zamba2": _LLAMA
    | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
    | {"use_mem_rope": True, "chunk_size": 16}
    | _ZAMBA,
    # Rows of queries, keys and values head by head, and a head of another name in files than in memory.
    "gpt_neox": _LLAMA,
    "nemotron_h": {"hidden_size": 32, "hybrid_override_pattern": "M-M*-"} | _NEMOTRON,
}
"""config.json by model type, less the vocabulary of 300."""


def _config(kind: str) -> Any:
    return type(AutoConfig.for_model(kind.partition(",")[0])).from_dict(_KEYS[kind] | {"vocab_size": 300})


CONFIGS = {kind: partial(_config, kind) for kind in _KEYS}


def publish(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model as transformers saves it, with a tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    model.save_pretrained(folder)
    checkpoints.tokenizer().save(folder)
    return folder
