"""The forms that LLM Foundry's YAMLs take, and what they mean here."""

import contextlib
import json
import math
import random
from typing import Any

import pytest
import yaml

from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import Loader
from llmtrain.convert.foundry.migrate import migrate
from llmtrain.convert.foundry.optimization import read_duration
from llmtrain.convert.foundry.write import flow_text
from llmtrain.errors import UserError
from tests.support.foundry import TASKS, changed, harmless, left, migrated, our_config


def test_a_whole_file(tmp_path):
    config = our_config(tmp_path)
    assert config.name == "small-books" and config.run_dir == "out/small-books" and config.seed == 3
    model, block = config.model, config.model.blocks["attn"]
    assert (model.vocab_size, model.d_model, model.max_seq_len, model.layers) == (640, 96, 64, "attn*3")
    assert model.positions == "learned" and model.tie_embeddings and model.norm.type == "layernorm" and model.norm.bias
    assert (model.init.type, model.init.scale_residual) == ("kaiming", True)
    assert block.type == "attention" and block.n_heads == 6 and block.qkv_bias and block.out_bias
    assert block.mlp is not None and (block.mlp.type, block.mlp.d_ff, block.mlp.bias) == ("gelu", 384, True)
    train, validation = config.data.train_streams()["books"], config.data.validation_streams()["books"]
    assert (train.local, train.split, validation.split) == ("/tokens/books", "train", "held_out")
    assert (config.data.seq_len, config.data.shuffle, config.data.shuffle_seed) == (64, True, 5)
    assert (str(config.train.duration), config.train.global_batch_size, config.train.microbatch_size) == (
        "100 steps",
        24,
        8,
    )
    assert config.train.clip_grad_norm == 0.5 and config.train.precision == "amp_bf16"
    assert config.train.activation_checkpointing.type == "full" and config.train.sharding.strategy == "full"
    assert str(config.eval.interval) == "20 steps" and config.eval.microbatch_size == 4
    assert str(config.checkpoint.interval) == "30 steps" and config.checkpoint.keep_last is None


def test_the_text_is_what_was_decided(tmp_path):
    """The printed YAML, read again, holds the same sections."""
    made = migrated(tmp_path, {"model.attn_config.rope": True, "loggers.wandb": {"tags": ["a b", "1", "{x}"]}})
    assert yaml.load(made.text, Loader) == made.sections
    assert made.text.startswith("# yaml-language-server: $schema=")


def test_variables_at_the_top_mean_the_same(tmp_path):
    """Older files have no `variables` block."""
    data = changed({})
    old = json.loads(json.dumps(data | data["variables"]).replace("${variables.", "${"))
    del old["variables"]
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(old))
    made = migrate(tmp_path / "old.yaml", TASKS)
    assert made.sections == migrated(tmp_path).sections and left(made) == {}


def test_a_variable_that_nothing_uses_is_unknown(tmp_path):
    assert "tokenizer_name" in left(migrated(tmp_path, {"tokenizer_name": "gpt2"}))


def test_parameters_of_an_mcli_file(tmp_path):
    (tmp_path / "mcli.yaml").write_text(yaml.safe_dump({"name": "job", "command": "x", "parameters": changed({})}))
    assert migrate(tmp_path / "mcli.yaml", TASKS).sections == migrated(tmp_path).sections


def test_a_blank_run_name_is_read_from_the_environment(tmp_path):
    changes = {"variables.run_name": None, "run_name": None, "save_folder": "out/${run_name}"}
    file = tmp_path / "foundry.yaml"
    file.write_text(yaml.safe_dump(changed(changes) | {"run_name": None}))
    made = migrate(file, TASKS)
    assert made.sections["name"] == "${oc.env:RUN_NAME,foundry}" and made.sections["run_dir"] == "out/${name}"


def test_the_environment_is_left_to_the_run(tmp_path):
    made = migrated(tmp_path, {"train_loader.dataset.remote": "${oc.env:BUCKET}/books"})
    assert made.sections["data"]["train"]["streams"]["books"]["remote"] == "${oc.env:BUCKET}/books"


def test_an_interpolation_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="seed"):
        migrated(tmp_path, {"seed": "${variables.absent}"})


def test_wrong_types_are_errors_all_at_once(tmp_path):
    with pytest.raises(ConfigError) as raised:
        migrated(tmp_path, {"model.d_model": "wide", "optimizer.lr": "fast", "max_duration": None})
    assert {problem.path for problem in raised.value.problems} == {"model.d_model", "optimizer.lr", "max_duration"}


def test_another_loader_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no loader that llmtrain has"):
        migrated(tmp_path, {"train_loader.name": "denoising"})


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("100ba", "100 steps"),
        ("2.5e3tok", "2500 tokens"),
        ("1_000 tok", "1000 tokens"),
        ("3ep", "3 epochs"),
        (2, "2 epochs"),
        ("49sp", "3 steps"),
        ("0.05dur", "5 %"),
        ("1dur", "100 %"),
        ("30sec", None),
        ("soon", None),
        (True, None),
    ],
)
def test_durations(text, ours):
    read = read_duration(text, 24)
    assert (read and str(read)) == ours


class TestModel:
    def block(self, folder, changes) -> tuple[Any, Any]:
        config = our_config(folder, {f"model.{key}": value for key, value in changes.items()})
        return config.model, config.model.blocks["attn"]

    def test_no_bias(self, tmp_path):
        model, block = self.block(tmp_path, {"no_bias": True})
        assert not (model.norm.bias or block.qkv_bias or block.out_bias or block.mlp.bias)
        assert self.block(tmp_path, {"no_bias": True, "attention_bias": True})[1].qkv_bias

    def test_alibi_turns_learned_positions_off(self, tmp_path):
        model, block = self.block(tmp_path, {"attn_config.alibi": True, "learned_pos_emb": True})
        assert (model.positions, block.position.type, block.position.max_bias) == ("none", "alibi", 8.0)

    def test_rotary(self, tmp_path):
        llama3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
        scaling = llama3 | {"original_max_position_embeddings": 32}
        rope = {"rope": True, "rope_impl": "hf", "rope_theta": 5000, "rope_hf_config": scaling}
        _, block = self.block(tmp_path, {"attn_config": rope})
        assert block.position.theta == 5000
        assert block.position.scaling.model_dump() == {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 32,
        }
        dynamic = {"rope": True, "rope_impl": "hf", "rope_hf_config": {"type": "dynamic", "factor": 2}}
        assert "model.attn_config.rope_hf_config" in left(migrated(tmp_path, {"model.attn_config": dynamic}))

    def test_heads_window_and_clip(self, tmp_path):
        attention = {"attn_type": "grouped_query_attention", "kv_n_heads": 2, "sliding_window_size": 15, "clip_qkv": 6}
        _, block = self.block(tmp_path, {"attn_config": attention | {"qk_ln": True}})
        assert (block.n_kv_heads, block.sliding_window, block.clip_qkv, block.qk_norm) == (2, 16, 6.0, "full")

    @pytest.mark.parametrize(
        ("ffn", "ours"),
        [
            ({"ffn_type": "mptmlp"}, "gelu"),
            ({"ffn_type": "mptglu"}, "geglu"),
            ({"ffn_type": "mptglu", "ffn_act_fn": {"name": "silu"}}, "swiglu"),
        ],
    )
    def test_mlps(self, ffn, ours, tmp_path):
        assert self.block(tmp_path, {"ffn_config": ffn})[1].mlp.type == ours
        assert left(migrated(tmp_path, {"model.ffn_config": ffn})) == {}

    @pytest.mark.parametrize(
        "ffn",
        [
            {"ffn_act_fn": {"name": "relu"}},
            {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}},
            {"ffn_type": "mb_dmoe", "moe_num_experts": 4},
            {"ffn_type": "te_ln_mlp"},
        ],
        ids=str,
    )
    def test_other_mlps_are_left(self, ffn, tmp_path):
        found = left(migrated(tmp_path, {"model.ffn_config": ffn}))
        assert found.keys() == {f"model.ffn_config.{key}" for key in ffn}

    def test_a_ratio_with_a_fraction(self, tmp_path):
        assert self.block(tmp_path, {"expansion_ratio": 2.5})[1].mlp.d_ff == 240

    def test_block_overrides_become_blocks_and_a_pattern(self, tmp_path):
        overrides = {
            "order": [
                {"name": "default"},
                {"repeat": 2, "order": [{"name": "near"}, {"name": "near-reuse", "repeat": 2}]},
            ],
            "overrides": {
                "near": {"attn_config": {"sliding_window_size": 15}},
                "near-reuse": {"attn_config": {"sliding_window_size": 15, "reuse_kv_layer_idx": -1}},
            },
        }
        changes = {"n_layers": 7, "block_overrides": overrides}
        model, block = self.block(tmp_path, changes)
        assert model.layers == "attn (near near_reuse*2)*2" and len(model.layer_list()) == 7
        assert block.sliding_window is None and model.blocks["near"].sliding_window == 16
        found = left(migrated(tmp_path, {f"model.{key}": value for key, value in changes.items()}))
        assert found.keys() == {"model.block_overrides.overrides.near-reuse.attn_config.reuse_kv_layer_idx"}

    @pytest.mark.parametrize(
        ("init", "std", "scaled", "noted"),
        [
            ({"name": "baseline_", "init_std": 0.03}, 0.03, True, set()),
            ({"name": "baseline_", "init_std": 0.03, "init_div_is_residual": False}, 0.03, False, set()),
            ({"name": "baseline_", "init_std": 0.03, "init_div_is_residual": math.sqrt(6)}, 0.03, True, set()),
            ({"name": "baseline_", "init_std": 0.03, "emb_init_std": 0.03}, 0.03, True, set()),
            ({"name": "small_init_"}, math.sqrt(2 / (5 * 96)), True, set()),
            (
                {"name": "baseline_", "init_std": 0.03, "init_div_is_residual": 7.0},
                0.03,
                True,
                {"init_div_is_residual"},
            ),
            ({"name": "baseline_", "init_std": 0.03, "emb_init_std": 1.0}, 0.03, True, {"emb_init_std"}),
            ({"name": "neox_init_"}, math.sqrt(2 / (5 * 96)), True, {"name"}),
            ({"name": "kaiming_normal_"}, None, True, set()),
            ({"name": "kaiming_normal_", "fan_mode": "fan_out"}, None, True, {"fan_mode"}),
            ({"name": "kaiming_uniform_"}, None, True, {"name"}),
            ({"name": "default_"}, None, True, {"name"}),
            ({"emb_init_uniform_lim": [-0.1, 0.1]}, None, True, {"emb_init_uniform_lim"}),
        ],
        ids=str,
    )
    def test_initial_weights(self, init, std, scaled, noted, tmp_path):
        ours = self.block(tmp_path, {"init_config": init})[0].init
        assert ours.type == ("normal" if std else "kaiming") and ours.scale_residual == scaled
        assert not std or ours.std == pytest.approx(std)
        assert left(migrated(tmp_path, {"model.init_config": init})).keys() == {
            f"model.init_config.{key}" for key in noted
        }


class TestHuggingFace:
    def migrated(self, folder, **model):
        return migrated(folder, {"model": {"name": "hf_causal_lm", "pretrained": False, **model}})

    def test_llama_of_a_published_size(self, tmp_path):
        made = self.migrated(tmp_path, pretrained_model_name_or_path="meta-llama/Llama-3.1-8B")
        block = made.sections["model"]["blocks"]["attn"]
        assert (block["n_heads"], block["n_kv_heads"], block["mlp"]["d_ff"]) == (32, 8, 14336) and left(made) == {}

    def test_a_folder_with_overrides(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 99}))
        overrides = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        model = self.migrated(
            tmp_path, pretrained_model_name_or_path=str(tmp_path), config_overrides=overrides
        ).sections["model"]
        assert (model["d_model"], model["vocab_size"], model["layers"]) == (64, 99, "attn*2")

    def test_gpt_neo_alternates_and_does_not_scale(self, tmp_path):
        made = self.migrated(tmp_path, pretrained_model_name_or_path="EleutherAI/gpt-neo-125M")
        model = made.sections["model"]
        assert model["layers"] == "(attn local)*6" and model["blocks"]["local"]["sliding_window"] == 256
        assert {block["softmax_scale"] for block in model["blocks"].values()} == {1.0}
        assert "gelu_new" in left(made)["model.pretrained_model_name_or_path"]

    def test_mpt_of_a_published_size(self, tmp_path):
        made = self.migrated(tmp_path, pretrained_model_name_or_path="mosaicml/mpt-7b")
        model = made.sections["model"]
        assert model["blocks"]["attn"]["position"] == {"type": "alibi"} and model["positions"] == "none"
        assert "qkv_bias" not in model["blocks"]["attn"] and left(made) == {}

    def test_mpt_in_a_folder_explains_what_it_has_and_ours_has_not(self, tmp_path):
        config = {
            "model_type": "mpt",
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "logit_scale": 0.5,
            "torch_dtype": "x",
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = left(self.migrated(tmp_path, pretrained_model_name_or_path=str(tmp_path)))
        assert found == {"model.pretrained_model_name_or_path.logit_scale": "logits are not scaled"}

    def test_an_unknown_model_has_to_be_given(self, tmp_path):
        made = self.migrated(tmp_path, pretrained_model_name_or_path="some-org/some-model")
        assert made.sections["model"]["d_model"] == "???" and yaml.load(made.text, Loader) == made.sections
        assert "config.json" in left(made)["model.pretrained_model_name_or_path"]

    def test_every_type_that_is_imported_is_read(self, tmp_path):
        config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 99}
        (tmp_path / "config.json").write_text(json.dumps(config))
        made = self.migrated(tmp_path, pretrained_model_name_or_path=str(tmp_path))
        model = made.sections["model"]
        assert left(made) == {} and model["layers"] == "attn*2" and model["blocks"]["attn"]["qk_norm"]
        assert model["init"] == {"std": 0.02, "scale_residual": False}

    def test_a_type_that_cannot_be_expressed_names_its_setting(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "phimoe", "num_local_experts": 8}))
        made = self.migrated(tmp_path, pretrained_model_name_or_path=str(tmp_path))
        assert "num_local_experts" in left(made)["model.pretrained_model_name_or_path"]

    @pytest.mark.parametrize(
        ("name", "text"), [("llama-3-8b", "llmtrain import llama-3-8b OUT"), ("gpt2", "type gpt2")]
    )
    def test_pretrained_weights_name_the_command_or_why_there_is_none(self, name, text, tmp_path):
        made = self.migrated(tmp_path, pretrained_model_name_or_path=name, pretrained=True)
        assert text in left(made)["model.pretrained"]


class TestData:
    STREAMS = {
        "web": {"remote": "s3://b/web", "local": "/w", "proportion": 0.8},
        "code": {"local": "/c", "proportion": 0.2},
    }

    def test_streams(self, tmp_path):
        changes = {"train_loader.dataset.streams": self.STREAMS, "train_loader.dataset.local": None}
        streams = our_config(tmp_path, changes).data.train_streams()
        assert [(name, s.local, s.remote, s.split, s.proportion) for name, s in streams.items()] == [
            ("web", "/w", "s3://b/web", "train", 0.8),
            ("code", "/c", None, "train", 0.2),
        ]

    def test_repeat_and_unknown_keys_of_a_stream(self, tmp_path):
        streams = {"web": {"local": "/w", "repeat": 2.0, "frobnicate": 1}}
        found = left(migrated(tmp_path, {"train_loader.dataset.streams": streams}))
        assert found.keys() == {f"train_loader.dataset.streams.web.{key}" for key in ("frobnicate",)}

    def test_several_eval_loaders(self, tmp_path):
        loaders = [
            {"name": "text", "label": label, "dataset": {"local": f"/{label}", "max_seq_len": 64}}
            for label in ("a", "b")
        ]
        made = migrated(tmp_path, {"eval_loader": loaders})
        assert list(made.sections["data"]["validation"]["streams"]) == ["a_a", "b_b"]
        assert left(made).keys() == {"eval_loader"}

    def test_no_validation(self, tmp_path):
        made = migrated(tmp_path, {"eval_interval": 0})
        assert "validation" not in made.sections["data"] and "eval_loader" in harmless(made)
        alone = migrated(tmp_path, {"eval_loader": None})
        assert {"eval_interval", "device_eval_batch_size"} <= harmless(alone) and "eval" not in alone.sections

    def test_shuffle_is_off_by_default_there(self, tmp_path):
        assert our_config(tmp_path, {"train_loader.dataset.shuffle": None}).data.shuffle is False


class TestRun:
    def test_clipping_is_off_by_default_there(self, tmp_path):
        assert our_config(tmp_path, {"algorithms": None}).train.clip_grad_norm is None

    @pytest.mark.parametrize(("found", "ours"), [("auto", "auto"), (None, "auto"), (0.5, 1), (16, 12), (100, 24)])
    def test_microbatches(self, found, ours, tmp_path):
        made = migrated(tmp_path, {"device_train_microbatch_size": found})
        assert made.sections["train"]["microbatch_size"] == ours
        assert "device_train_microbatch_size" in harmless(made)

    @pytest.mark.parametrize(
        ("fsdp", "ours"),
        [
            ({"sharding_strategy": "FULL_SHARD"}, {"strategy": "full"}),
            ({"sharding_strategy": "SHARD_GRAD_OP"}, {"strategy": "grad_op"}),
            ({"sharding_strategy": "HYBRID_SHARD"}, {"strategy": "hybrid"}),
            ({"sharding_strategy": "NO_SHARD"}, {"strategy": "hybrid", "shard_size": 1}),
            ({"data_parallel_shard_degree": 4}, {"strategy": "hybrid", "shard_size": 4}),
        ],
    )
    def test_sharding(self, fsdp, ours, tmp_path):
        made = migrated(tmp_path, {"fsdp_config": fsdp})
        assert made.sections["train"]["sharding"] == ours and left(made) == {}

    def test_without_a_batch_size_one_has_to_be_given(self, tmp_path):
        made = migrated(tmp_path, {"global_train_batch_size": None})
        assert made.sections["train"]["global_batch_size"] == "???"
        assert left(made).keys() == {"global_train_batch_size"}

    def test_a_remote_folder(self, tmp_path):
        made = migrated(
            tmp_path, {"save_folder": "s3://bucket/runs/{run_name}/checkpoints", "save_num_checkpoints_to_keep": 1}
        )
        assert made.sections["checkpoint"]["remote"] == "s3://bucket/runs/${name}/checkpoints"
        assert made.sections["checkpoint"]["keep_last"] is None
        assert "counts the copies here" in left(made)["save_num_checkpoints_to_keep"]

    def test_a_store_that_is_not_ours(self, tmp_path):
        made = migrated(tmp_path, {"save_folder": "gs://bucket/{run_name}"})
        assert "save_folder" in left(made) and "remote" not in made.sections["checkpoint"]

    def test_without_a_folder_nothing_was_saved(self, tmp_path):
        assert "save_folder" in harmless(migrated(tmp_path, {"save_folder": None}))


class TestTasks:
    LISTED = [
        {"label": "arc_easy", "num_fewshot": [0, 5], "icl_task_type": "multiple_choice", "dataset_uri": "x.jsonl"},
        {"label": "lambada_openai", "num_fewshot": [0], "icl_task_type": "language_modeling", "dataset_uri": "y.jsonl"},
        {
            "label": "bigbench_operators",
            "num_fewshot": [3],
            "icl_task_type": "language_modeling",
            "dataset_uri": "z.jsonl",
        },
    ]

    def test_listed(self, tmp_path):
        made = migrated(tmp_path, {"icl_tasks": self.LISTED, "icl_seq_len": 32}, tasks_file="eval-ours.yaml")
        assert made.sections["eval"]["icl"] == {"file": "eval-ours.yaml", "interval": "20 steps"}
        assert made.tasks is not None and yaml.safe_load(made.tasks) == {
            "convention": "foundry",
            "max_length": 32,
            "tasks": [{"task": "arc_easy", "shots": [0, 5]}, {"task": "lambada", "shots": [0]}],
        }
        assert "bigbench_operators" in left(made)["icl_tasks"]

    def test_in_a_file_above_the_yaml(self, tmp_path):
        (tmp_path / "eval").mkdir()
        (tmp_path / "eval" / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": self.LISTED[:1]}))
        (tmp_path / "train").mkdir()
        made = migrated(tmp_path / "train", {"icl_tasks": "eval/tasks.yaml"})
        assert "--icl FILE" in left(made)["icl_tasks"] and made.tasks is not None

    def test_in_a_file_that_is_not_there(self, tmp_path):
        assert "is not here" in left(migrated(tmp_path, {"icl_tasks": "eval/absent.yaml"}))["icl_tasks"]


def test_every_text_is_read_back_as_written():
    rng = random.Random(0)
    texts = [
        "yes",
        "1",
        "1e-4",
        "null",
        "~",
        "a: b",
        "a #b",
        "{x}",
        "[1]",
        "- a",
        "é",
        "",
        " a ",
        "${a.b}",
        "a:",
        "*x",
        "'",
        '"',
    ]
    texts += ["".join(rng.choices("aZ09 .:-{}[],#$'\"\\\n&*!|>%@`~", k=rng.randint(1, 8))) for _ in range(300)]
    for text in texts:
        section = {"plain": text, "list": [text], "mapping": {"key": text}}
        written = "\n".join(f"{key}: {flow_text(value)}" for key, value in section.items())
        assert yaml.load(written, Loader) == section, written


def test_the_comments_are_comments(tmp_path):
    """Values with line breaks or of any length stay inside the comments at the top."""
    made = migrated(tmp_path, {"metadata": {"text": "a\nb: c\n" * 20}, "load_path": "x\ny: z"})
    assert yaml.load(made.text, Loader) == made.sections
    assert all(line.startswith("#") for line in made.text.partition("\nname:")[0].splitlines())


def test_repeat_and_choose_of_streams_become_repeats_and_tokens(tmp_path):
    streams = {"a": {"local": "a", "repeat": 2}, "b": {"local": "b", "choose": 100}, "c": {"local": "c"}}
    made = migrated(tmp_path, {"train_loader.dataset.streams": streams, "train_loader.dataset.local": None})
    found = our_config(tmp_path, {"train_loader.dataset.streams": streams, "train_loader.dataset.local": None})
    assert not [path for path in left(made) if "streams" in path]
    assert found.data.train is not None
    assert {n: (s.repeats, s.tokens) for n, s in found.data.train.streams.items()} == {
        "a": (2.0, None),
        "b": (None, 6400),
        "c": (None, None),
    }


def test_a_tokenizers_limit_of_any_size_is_no_problem(tmp_path):
    assert our_config(tmp_path, {"tokenizer.kwargs.model_max_length": 10**30}).name == "small-books"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("optimizer.betas", ["yes", 0.95], "optimizer.betas.0"),
        ("model.d_model", -768, "model.d_model"),
        ("model.n_layers", float("-inf"), "model.n_layers"),
        ("max_seq_len", float("inf"), "max_seq_len"),
        ("model.expansion_ratio", float("nan"), "model.expansion_ratio"),
        ("scheduler.t_warmup", float("inf"), "scheduler.t_warmup"),
        ("device_train_microbatch_size", float("inf"), "device_train_microbatch_size"),
        ("train_loader.dataset.streams", {"a": 1}, "train_loader.dataset.streams.a"),
    ],
)
def test_a_value_of_another_type_or_range_is_named(tmp_path, path, value, expected):
    with pytest.raises(ConfigError, match=expected):
        migrated(tmp_path, {path: value})


MUTANTS = ("x", -1, 0, 2**100, 1.5, float("inf"), float("nan"), [], ["yes", 0.95], {"a": 1}, True)


@pytest.mark.ci
def test_mutants_of_every_key_are_read_or_refused(tmp_path):
    def paths(section, above=""):
        for key, value in section.items():
            yield f"{above}{key}"
            yield from paths(value, f"{above}{key}.") if isinstance(value, dict) else ()

    tried = 0
    for path in paths(changed({})):
        for value in MUTANTS:
            tried += 1
            with contextlib.suppress(UserError):
                migrated(tmp_path, {path: value})
    assert tried > 500


def test_no_import_is_named_for_a_larger_opt(tmp_path):
    model = {"name": "hf_causal_lm", "pretrained": True, "pretrained_model_name_or_path": "facebook/opt-6.7b"}
    assert "weights of type opt cannot be imported" in left(migrated(tmp_path, {"model": model}))["model.pretrained"]
