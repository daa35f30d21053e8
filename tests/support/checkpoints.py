"""Checkpoints made without training.

As a program it makes one of any size, for a measurement:

    python -m tests.support.checkpoints OUT [model.a=b ...]

is an MPT-7B as transformers' MptForCausalLM has it (ALiBi, no biases; 27 GB), every tensor filled with a number of its own.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import Manifest
from llmtrain.convert.writing import LazyTensor, write_parameters
from llmtrain.data.tokenizer import TextTokenizer, train_bpe
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for

MPT_7B: dict[str, Any] = {
    "vocab_size": 50368,
    "d_model": 4096,
    "norm": {"type": "layernorm"},
    "blocks": {
        "attn": {
            "type": "attention",
            "n_heads": 32,
            "position": {"type": "alibi"},
            "mlp": {"type": "gelu", "d_ff": 16384},
        }
    },
    "layers": "attn*32",
}


def mpt(d_model: int, n_layers: int, vocab_size: int) -> ModelConfig:
    attn = {**MPT_7B["blocks"]["attn"], "n_heads": 4, "mlp": {"type": "gelu", "d_ff": 4 * d_model}}
    changes = {"d_model": d_model, "vocab_size": vocab_size, "blocks": {"attn": attn}, "layers": f"attn*{n_layers}"}
    return ModelConfig.model_validate(MPT_7B | changes)


def tokenizer() -> TextTokenizer:
    return train_bpe(["the quick brown fox jumps over a lazy dog " * 20], 270)


def finish(folder: Path, config: ModelConfig) -> None:
    """Adds what makes a folder of shards a checkpoint, and a tokenizer."""
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    tokenizer().save(folder / "tokenizer")
    content = {"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}}
    written = Manifest(step=1, tokens=8, config=content, clock={}, data={}, versions={}, files=files)
    manifests.write(folder, written)


def save(folder: Path, config: ModelConfig, make: Callable[[tuple[int, ...]], Tensor] = torch.randn) -> Path:
    """As one rank saves it: every tensor whole, all in one file."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"model": dict(parameters(config, make))}, checkpoint_id=folder, no_dist=True)
    finish(folder, config)
    return folder


def parameters(config: ModelConfig, make: Callable[[tuple[int, ...]], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for weight in family_for(config).weights(config):
        yield weight.ours, make(weight.shape)


def save_lazily(folder: Path, config: ModelConfig) -> Path:
    """A tensor at a time; of any size."""
    weights = family_for(config).weights(config)
    lazy = [
        LazyTensor(weight.ours, weight.shape, lambda weight=weight, value=i: torch.full(weight.shape, float(value)))
        for i, weight in enumerate(weights)
    ]
    folder.mkdir(parents=True)
    write_parameters(folder, lazy, progress=lambda size: None)
    finish(folder, config)
    return folder


def main(out: str, *changes: str) -> None:
    section = dict(MPT_7B)
    for change in changes:
        path, _, value = change.partition("=")
        section[path.removeprefix("model.")] = yaml.safe_load(value)
    save_lazily(Path(out), ModelConfig.model_validate_json(json.dumps(section)))


if __name__ == "__main__":
    main(*sys.argv[1:])
