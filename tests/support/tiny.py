"""A hybrid model small enough that a step takes milliseconds."""

import copy
import json
from pathlib import Path
from typing import Any

from llmtrain.schema.config import Config

SEQ_LEN = 32
STEPS_PER_EPOCH = 16
GLOBAL_BATCH = 8

BLOCKS: dict[str, Any] = {
    "m": {"type": "mamba2", "d_state": 8, "head_dim": 16, "chunk_size": 16},
    "s": {
        "type": "shared_attention",
        "n_heads": 2,
        "position": {"type": "rotary"},
        "mlp": {"type": "geglu", "d_ff": 48},
        "adapter_rank": 4,
    },
}
"""A Mamba-2 and a shared attention block for d_model 32."""
_TINY = {
    "name": "tiny",
    "seed": 3,
    "model": {"vocab_size": 300, "d_model": 32, "max_seq_len": SEQ_LEN, "blocks": BLOCKS, "layers": "m (s+m)*2"},
    "data": {"seq_len": SEQ_LEN, "num_workers": 0},
    "train": {"duration": "24 steps", "global_batch_size": GLOBAL_BATCH, "microbatch_size": 4, "compile": "off"},
    "optimizer": {"lr": 3e-3},
    "schedule": {"type": "cosine", "warmup": "4 steps"},
    "eval": {"interval": "12 steps", "max_samples": 8},
    "checkpoint": {"interval": "1000 steps", "keep_last": None},
    "logging": {"tensorboard": False, "progress_bar": False},
}


def tiny_settings(shards: Path, run_dir: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The YAML of a tiny run as a mapping; `changes` by dotted path. A JSON dump of it is a valid YAML file."""
    settings = copy.deepcopy(_TINY)
    streams = {
        split: {"streams": {"text": {"local": str(shards), "split": split}}} for split in ("train", "validation")
    }
    settings["data"] |= streams
    settings["run_dir"] = str(run_dir)
    for path, value in (changes or {}).items():
        section: Any = settings
        *parents, last = path.split(".")
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return settings


def tiny_config(shards: Path, run_dir: Path, changes: dict[str, Any] | None = None) -> Config:
    return Config.model_validate_json(json.dumps(tiny_settings(shards, run_dir, changes)))
