"""Checkpoints made without training."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import Manifest
from llmtrain.convert.lazy_checkpoint import LazyTensor, write_parameters
from llmtrain.data.tokenize.stored_tokenizer import CHECKSUMS, checksums
from llmtrain.data.tokenize.tokenizer import TextTokenizer, train_bpe
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model

SAVE_ID = "00000000-0000-4000-8000-000000000000"


def mpt(d_model: int, n_layers: int, vocab_size: int) -> ModelConfig:
    """The form of MptForCausalLM: ALiBi, no biases."""
    mlp = {"type": "gelu", "d_ff": 4 * d_model}
    attn = {"type": "attention", "n_heads": 4, "position": {"type": "alibi"}, "mlp": mlp}
    sizes = {"d_model": d_model, "vocab_size": vocab_size, "norm": {"type": "layernorm"}}
    return ModelConfig.model_validate(sizes | {"blocks": {"attn": attn}, "layers": f"attn*{n_layers}"})


def nemotron_h(d_model: int, n_layers: int, vocab_size: int) -> ModelConfig:
    """The form of Nemotron-H 8B: four layers of Mamba-2 for one of attention, an MLP in each."""
    mlp = {"type": "relu2", "d_ff": d_model * 21 // 4}
    blocks = {
        "mamba": {"type": "mamba2", "n_groups": 8, "mlp": mlp},
        "attn": {"type": "attention", "n_heads": d_model // 128, "n_kv_heads": 1, "mlp": mlp},
    }
    layers = f"(mamba*4 attn)*{n_layers // 5}"
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "tie_embeddings": False}
    return ModelConfig.model_validate(sizes | {"blocks": blocks, "layers": layers})


def tokenizer() -> TextTokenizer:
    return train_bpe(["the quick brown fox jumps over a lazy dog " * 20], 270)


def save(
    folder: Path,
    config: ModelConfig,
    make: Callable[[tuple[int, ...]], Tensor] = torch.randn,
    own: TextTokenizer | None = None,
) -> Path:
    """Write a checkpoint with tensors made by `make`, and its own tokenizer."""
    torch.manual_seed(0)
    makes = [bind(make, weight.shape) for weight in family_for_model(config).weights(config)]
    return write(folder, config, makes, own)


def write(
    folder: Path, config: ModelConfig, makes: Sequence[Callable[[], Tensor]], own: TextTokenizer | None = None
) -> Path:
    """A tensor at a time, so of any size."""
    weights = family_for_model(config).weights(config)
    return write_tensors(
        folder, config, [LazyTensor(w.ours, w.shape, make) for w, make in zip(weights, makes, strict=True)], own
    )


def write_tensors(
    folder: Path, config: ModelConfig, lazy: Sequence[LazyTensor], own: TextTokenizer | None = None
) -> Path:
    """Write a checkpoint with a tokenizer."""
    folder.mkdir(parents=True)
    files = write_parameters(folder, lazy, progress=lambda size: None, save_id=SAVE_ID)
    (own or tokenizer()).save(folder / "tokenizer")
    content = {"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}}
    content[CHECKSUMS] = checksums(folder / "tokenizer")
    manifests.write(
        folder, Manifest(save_id=SAVE_ID, step=1, tokens=8, config=content, clock={}, data={}, versions={}, files=files)
    )
    return folder


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Other fields, and the checksum that goes with them."""
    manifests.write(folder, dataclasses.replace(manifests.read(folder), **changes))


def flip_bit(file: Path, place: int) -> None:
    """place: in bits, from the start; negative, from the end."""
    content = bytearray(file.read_bytes())
    place %= 8 * len(content)
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
