"""Small random models of transformers, saved with a tokenizer."""

from pathlib import Path
from typing import Any

import torch

from llmtrain.data.tokenize.tokenizer import TextTokenizer


def llama(vocab_size: int, max_seq_len: int) -> Any:
    """Two layers, with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_seq_len,
    )
    return LlamaForCausalLM(config)


def save_random(model: Any, tokenizer: TextTokenizer, folder: Path) -> Path:
    """Save a model, with weights made large enough that it prefers some tokens, and a tokenizer, whose token 0 ends texts."""
    model = model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "D")):
                parameter += 0.1 * torch.randn(parameter.shape)
    model.config.pad_token_id = model.config.eos_token_id = model.config.bos_token_id = 0
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder
