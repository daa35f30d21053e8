"""YAMLs in LLM Foundry's format, written for these tests, and what `llmtrain migrate` makes of them."""

import copy
from pathlib import Path
from typing import Any

import yaml

from llmtrain.convert.foundry.migrate import Migration, migrate
from llmtrain.schema.config import Config
from llmtrain.schema.load import load_config

TASKS = ("arc_easy", "lambada", "winograd")

FULL = """
variables:
  shards: /tokens/books
  length: 64
  run_name: small-books
max_seq_len: ${variables.length}
run_name: ${variables.run_name}
model:
  name: mpt_causal_lm
  d_model: 96
  n_heads: 6
  n_layers: 3
  vocab_size: 640
  max_seq_len: ${variables.length}
  attn_config: {attn_impl: flash}
tokenizer: {name: our-org/our-tokenizer, kwargs: {model_max_length: "${variables.length}"}}
train_loader:
  name: text
  dataset:
    local: ${variables.shards}
    split: train
    shuffle: true
    max_seq_len: ${variables.length}
    shuffle_seed: 5
  drop_last: true
  num_workers: 3
eval_loader:
  name: text
  dataset: {local: "${variables.shards}", split: held_out, shuffle: false, max_seq_len: "${variables.length}"}
  drop_last: false
  num_workers: 3
scheduler: {name: cosine_with_warmup, t_warmup: 10ba, alpha_f: 0.05}
optimizer: {name: decoupled_adamw, lr: 2.0e-3, betas: [0.9, 0.97], eps: 1.0e-9, weight_decay: 0.0}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 0.5}}
max_duration: 100ba
eval_interval: 20ba
global_train_batch_size: 24
seed: 3
device_eval_batch_size: 4
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}
callbacks: {speed_monitor: {window_size: 4}}
save_folder: out/{run_name}/checkpoints
save_interval: 30ba
"""


def changed(changes: dict[str, Any], text: str = FULL) -> dict[str, Any]:
    """The YAML's data with values set by dotted path; None removes a key."""
    data = copy.deepcopy(yaml.safe_load(text))
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = data
        for key in parents:
            section = section.setdefault(key, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return data


def migrated(folder: Path, changes: dict[str, Any] | None = None, text: str = FULL, **options: Any) -> Migration:
    file = folder / "foundry.yaml"
    file.write_text(yaml.safe_dump(changed(changes or {}, text), sort_keys=False), encoding="utf-8")
    return migrate(file, TASKS, **options)


def our_config(folder: Path, changes: dict[str, Any] | None = None, text: str = FULL) -> Config:
    """The migrated config, as `llmtrain train` reads its text."""
    file = folder / "ours.yaml"
    file.write_text(migrated(folder, changes, text).text, encoding="utf-8")
    return load_config(file)


def left(made: Migration) -> dict[str, str]:
    """Path -> reason of what is left to decide."""
    return {note.path: note.text for note in made.notes.left}


def harmless(made: Migration) -> set[str]:
    return {note.path for note in made.notes.harmless}
