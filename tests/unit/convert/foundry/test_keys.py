"""Every key of the tables: what is mapped reaches the output, and nothing else is dropped without a word."""

from pathlib import Path

import pytest

from llmtrain.convert.foundry.keys import MAPPED, MISSING, NOT_NEEDED, meaning, table
from tests.support.foundry import harmless, left, migrated

PAGE = Path(__file__).parents[4] / "docs" / "migrating-from-llm-foundry.md"

ROTARY = {"model.attn_config.rope": True}
OTHER_VALUES = {
    "variables": {"variables.length": 32},
    "run_name": {"run_name": "other"},
    "max_seq_len": {"max_seq_len": 32, "train_loader.dataset.max_seq_len": None},
    "seed": {"seed": 4},
    "max_duration": {"max_duration": "9000tok"},
    "global_train_batch_size": {"global_train_batch_size": 48},
    "device_train_microbatch_size": {"device_train_microbatch_size": 4},
    "device_eval_batch_size": {"device_eval_batch_size": 2},
    "precision": {"precision": "fp32"},
    "eval_interval": {"eval_interval": "2ep"},
    "eval_subset_num_batches": {"eval_subset_num_batches": 7},
    "save_folder": {"save_folder": "elsewhere"},
    "save_interval": {"save_interval": "5ba"},
    "save_num_checkpoints_to_keep": {"save_num_checkpoints_to_keep": 2},
    "progress_bar": {"progress_bar": True},
    "console_log_interval": {"console_log_interval": "10ba"},
    "icl_tasks": {"icl_tasks": [{"label": "arc_easy", "num_fewshot": [0]}]},
    "icl_seq_len": {"icl_seq_len": 32},
    "tokenizer.name": {"tokenizer.name": "another"},
    "model.name": {"model.name": "hf_causal_lm", "model.pretrained_model_name_or_path": "gpt2"},
    "model.vocab_size": {"model.vocab_size": 700},
    "model.d_model": {"model.d_model": 48},
    "model.n_heads": {"model.n_heads": 3},
    "model.n_layers": {"model.n_layers": 5},
    "model.head_dim": {"model.head_dim": 8},
    "model.max_seq_len": {"model.max_seq_len": 128},
    "model.expansion_ratio": {"model.expansion_ratio": 2},
    "model.no_bias": {"model.no_bias": True},
    "model.attention_bias": {"model.attention_bias": False},
    "model.norm_type": {"model.norm_type": "rmsnorm"},
    "model.norm_eps": {"model.norm_eps": 1e-6},
    "model.learned_pos_emb": {"model.learned_pos_emb": False},
    "model.tie_word_embeddings": {"model.tie_word_embeddings": False},
    "model.final_logit_softcapping": {"model.final_logit_softcapping": 30.0},
    "model.resid_pdrop": {"model.resid_pdrop": 0.1},
    "model.emb_pdrop": {"model.emb_pdrop": 0.1},
    "model.block_overrides": {
        "model.block_overrides": {
            "order": [{"name": "default"}, {"name": "near", "repeat": 2}],
            "overrides": {"near": {"attn_config": {"sliding_window_size": 15}}},
        }
    },
    "model.z_loss": {"model.z_loss": 1e-4},
    "model.attn_config.attn_type": {"model.attn_config.attn_type": "multiquery_attention"},
    "model.attn_config.kv_n_heads": {
        "model.attn_config.attn_type": "grouped_query_attention",
        "model.attn_config.kv_n_heads": 2,
    },
    "model.attn_config.qk_ln": {"model.attn_config.qk_ln": True},
    "model.attn_config.qk_gn": {"model.attn_config.qk_gn": True},
    "model.attn_config.clip_qkv": {"model.attn_config.clip_qkv": 6},
    "model.attn_config.softmax_scale": {"model.attn_config.softmax_scale": 0.5},
    "model.attn_config.attn_logit_softcapping": {"model.attn_config.attn_logit_softcapping": 20},
    "model.attn_config.sliding_window_size": {"model.attn_config.sliding_window_size": 15},
    "model.attn_config.attn_uses_sequence_id": {"model.attn_config.attn_uses_sequence_id": True},
    "model.attn_config.alibi": {"model.attn_config.alibi": True},
    "model.attn_config.alibi_bias_max": {"model.attn_config.alibi": True, "model.attn_config.alibi_bias_max": 16},
    "model.attn_config.rope": ROTARY,
    "model.attn_config.nope": {
        "model.attn_config.alibi": True,
        "model.block_overrides": {
            "order": [{"order": [{"name": "default"}, {"name": "bare"}, {"name": "default"}]}],
            "overrides": {"bare": {"attn_config": {"nope": True}}},
        },
    },
    "model.attn_config.rope_theta": ROTARY | {"model.attn_config.rope_theta": 500},
    "model.attn_config.rope_dail_config": ROTARY | {"model.attn_config.rope_dail_config": {"type": "xpos"}},
    "model.attn_config.rope_hf_config": ROTARY
    | {"model.attn_config.rope_impl": "hf", "model.attn_config.rope_hf_config": {"type": "linear", "factor": 2.0}},
    "model.ffn_config.ffn_type": {"model.ffn_config.ffn_type": "mptglu"},
    "model.ffn_config.ffn_hidden_size": {"model.ffn_config.ffn_hidden_size": 100},
    "model.ffn_config.ffn_act_fn": {
        "model.ffn_config.ffn_type": "mptglu",
        "model.ffn_config.ffn_act_fn": {"name": "silu"},
    },
    "model.init_config": {"model.init_config": {"name": "baseline_", "init_std": 0.03}},
    "model.pretrained_model_name_or_path": {
        "model": {
            "name": "hf_causal_lm",
            "pretrained": False,
            "pretrained_model_name_or_path": "EleutherAI/gpt-neo-125M",
        }
    },
    "model.config_overrides": {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "gpt2", "config_overrides": {"n_layer": 2}}
    },
    "model.pretrained": {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "gpt2", "pretrained": True}
    },
    "train_loader.dataset.local": {"train_loader.dataset.local": "/else"},
    "train_loader.dataset.remote": {"train_loader.dataset.remote": "s3://bucket/books"},
    "train_loader.dataset.split": {"train_loader.dataset.split": "other"},
    "train_loader.dataset.streams": {"train_loader.dataset.streams": {"a": {"local": "/a"}}},
    "train_loader.dataset.max_seq_len": {"train_loader.dataset.max_seq_len": 32},
    "train_loader.dataset.shuffle": {"train_loader.dataset.shuffle": False},
    "train_loader.dataset.shuffle_seed": {"train_loader.dataset.shuffle_seed": 6},
    "train_loader.dataset.shuffle_block_size": {"train_loader.dataset.shuffle_block_size": 1000},
    "train_loader.dataset.num_canonical_nodes": {"train_loader.dataset.num_canonical_nodes": 2},
    "train_loader.dataset.predownload": {"train_loader.dataset.predownload": 100},
    "train_loader.num_workers": {"train_loader.num_workers": 1},
    "eval_loader": {"eval_loader": None},
    "optimizer.name": {"optimizer.name": "decoupled_lionw"},
    "optimizer.lr": {"optimizer.lr": 1e-3},
    "optimizer.betas": {"optimizer.betas": [0.8, 0.9]},
    "optimizer.eps": {"optimizer.eps": 1e-6},
    "optimizer.weight_decay": {"optimizer.weight_decay": 1e-5},
    "scheduler.name": {"scheduler.name": "linear_decay_with_warmup"},
    "scheduler.t_warmup": {"scheduler.t_warmup": "0.2dur"},
    "scheduler.alpha_f": {"scheduler.alpha_f": 0.5},
    "scheduler.alpha_i": {"scheduler.name": "linear_decay_with_warmup", "scheduler.alpha_i": 0.5},
    "scheduler.alpha": {"scheduler.name": "constant_with_warmup", "scheduler.alpha": 0.5, "scheduler.alpha_f": None},
    "scheduler.t_max": {"scheduler.t_max": "200ba"},
    "scheduler.t_scale": {"scheduler": {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "t_scale": "20ba"}},
    "scheduler.t_cooldown": {"scheduler": {"name": "inv_sqrt_with_warmup", "t_warmup": "10ba", "t_cooldown": "9ba"}},
    "algorithms.gradient_clipping": {"algorithms": {}},
    "fsdp_config.sharding_strategy": {"fsdp_config.sharding_strategy": "SHARD_GRAD_OP"},
    "fsdp_config.data_parallel_shard_degree": {"fsdp_config.data_parallel_shard_degree": 2},
    "fsdp_config.activation_checkpointing": {"fsdp_config.activation_checkpointing": False},
    "loggers.wandb": {"loggers.wandb": {"project": "books"}},
    "loggers.tensorboard": {"loggers.tensorboard": {"log_dir": "tb"}},
}
"""Mapped key -> changes of a YAML that must show in the output."""


def test_every_mapped_key_is_tried():
    assert OTHER_VALUES.keys() == MAPPED.keys() - {"train_loader.name"}


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> str:
    return migrated(tmp_path_factory.mktemp("before")).text


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_mapped_key_reaches_the_output(key, before, tmp_path):
    assert migrated(tmp_path, OTHER_VALUES[key]).text != before


def test_keys_that_are_not_needed_are_named(tmp_path):
    values = {key: {"x": 1} if key.startswith(("callbacks", "loggers")) else "value" for key in NOT_NEEDED}
    made = migrated(tmp_path, values)
    assert NOT_NEEDED.keys() - harmless(made) == set() and left(made) == {}


def test_keys_without_a_counterpart_are_left_with_their_reason_and_value(tmp_path):
    whole = {"algorithms", "callbacks", "loggers"}
    at = {key: f"{key}.moe_top_k" if key == "model.ffn_config" else key for key in MISSING.keys() - whole}
    made = migrated(tmp_path, dict.fromkeys(at.values(), 0.75))
    assert left(made) == {path: MISSING[key][1] for key, path in at.items()}
    comments = " ".join(line.strip("# ") for line in made.text.splitlines())
    assert [path for path in at.values() if f"{path}: 0.75" not in comments] == []


def test_values_without_effect_are_not_left_to_decide(tmp_path):
    for last in (1, -1):
        values = {key: values[last] for key, (values, _) in MISSING.items() if len(values) > 1}
        assert left(migrated(tmp_path, values)) == {}


@pytest.mark.parametrize(
    "key",
    [
        "frobnicate",
        "model.frobnicate",
        "model.attn_config.frobnicate",
        "optimizer.frobnicate",
        "scheduler.frobnicate",
        "train_loader.dataset.frobnicate",
        "fsdp_config.frobnicate",
        "save_frequency",
    ],
)
def test_an_unknown_key_is_left_and_called_unknown(key, tmp_path):
    assert "is no key of LLM Foundry's" in left(migrated(tmp_path, {key: 1}))[key]


@pytest.mark.parametrize("section", ["callbacks", "loggers", "algorithms"])
def test_an_unknown_part_is_left(section, tmp_path):
    assert f"{section}.our_own" in left(migrated(tmp_path, {f"{section}.our_own": {"a": 1}}))


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8"), "run python scripts/generate_reference.py"


@pytest.mark.parametrize("name, left_over", [("weird_norm", True), ("triton_rmsnorm", False), ("LayerNorm", False)])
def test_an_unknown_norm_is_left(name, left_over, tmp_path):
    assert ("model.norm_type" in left(migrated(tmp_path, {"model.norm_type": name}))) == left_over


def test_a_number_is_no_key():
    assert meaning("3") is None and meaning("") is None and meaning("model.3") is None
