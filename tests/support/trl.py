"""Tiny models, a tokenizer and a trainer's settings for TRL's trainers as oracles."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import SequentialSampler

from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from tests.support import hf

STEPS, EOS, TOLERANCE = 20, 1, 1e-5
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ZAMBA2 = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
    "mamba_d_state": 4,
    "mamba_expand": 2,
    "n_mamba_heads": 2,
    "mamba_ngroups": 1,
    "chunk_size": 8,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_mem_blocks": 1,
    "use_mem_rope": True,
}
NEMOTRON_H = {
    "hidden_size": 16,
    "layers_block_type": ["mamba", "attention", "mamba"],
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "n_groups": 1,
    "chunk_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def peer_of(family: str) -> Any:
    import transformers

    config, model, settings = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
        "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", ZAMBA2),
        "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", NEMOTRON_H),
    }[family]
    more = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS, "max_position_embeddings": 128}
    torch.manual_seed(3)
    made = getattr(transformers, config)(vocab_size=hf.VOCAB, **settings, **more)
    peer = getattr(transformers, model)._from_config(made, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "D")):
                parameter.add_(0.05 * torch.randn_like(parameter))
    return peer


def text(ids: list[int]) -> str:
    return "".join(chr(0x4E00 + one) for one in ids)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": EOS, "<unk>": 2} | {text([one]): one for one in range(3, hf.VOCAB)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def of_peer(peer: Any) -> CausalLM:
    """Our model of the same weights, with document masks."""
    plain = hf.ours_in_memory(peer)
    ours = HybridLM(plain.config, platform=platform.cpu(), documents=True)
    ours.load_state_dict(plain.state_dict())
    return CausalLM(ours)


def settings(folder: Any, batch_size: int) -> dict[str, Any]:
    """Of TrainingArguments: AdamW at a constant rate, a loss for each of STEPS steps, no files."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch_size,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": 64,
    }


def in_order(trainer: Any) -> Any:
    """A class of TRL's trainers that takes samples in the order of the data."""

    class InOrder(trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder
