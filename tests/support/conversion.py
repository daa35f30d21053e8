"""Running `llmtrain export` and `import`, and small models as transformers publishes them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    NemotronHConfig,
    Zamba2Config,
)

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
        n_mamba_heads=4,
        mamba_ngroups=1,
        num_mem_blocks=2,
        adapter_rank=4,
        use_mem_rope=True,
        chunk_size=16,
    ),
    # Rows of queries, keys and values head by head, and a head of another name in files than in memory.
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    ),
    "nemotron_h": lambda: NemotronHConfig.from_dict(
        {
            "vocab_size": 300,
            "hidden_size": 32,
            "hybrid_override_pattern": "M-M*-",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
        }
    ),
}


def publish(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model as transformers saves it, with a tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype)
    model.save_pretrained(folder)
    checkpoints.tokenizer().save(folder)
    return folder
