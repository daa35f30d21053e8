"""LLM Foundry's YAMLs for finetuning, as runs of ours on the trained tokens of conversations."""

from typing import Any

import pytest
import yaml

from llmtrain.adapt.base import meta_model
from llmtrain.config.report import ConfigError
from llmtrain.convert.foundry.migrate import Migration, migrate
from llmtrain.schema.load import load_config
from tests.support.foundry import changed

DATASET = {"hf_name": "our-org/chats", "split": "train", "max_seq_len": 64, "shuffle": True}


def finetuning(tmp_path, dataset: dict[str, Any], **changes: Any) -> Migration:
    given = changed({"eval_interval": 0, "eval_loader": None} | changes)
    given["train_loader"] = {
        "name": "finetuning",
        "dataset": {k: v for k, v in (DATASET | dataset).items() if v is not None},
    }
    (tmp_path / "foundry.yaml").write_text(yaml.safe_dump(given))
    return migrate(tmp_path / "foundry.yaml")


def prepare_of(made: Migration) -> dict[str, Any]:
    return made.sections["data"]["prepare"]


def left(made: Migration) -> set[str]:
    return {note.path.removeprefix("train_loader.dataset.") for note in made.notes.left}


def test_a_finetuning_yaml_is_one_of_ours(tmp_path):
    made = finetuning(tmp_path, {"packing_ratio": 3.5, "target_prompts": "length>=100", "target_responses": "all"})
    (tmp_path / "ours.yaml").write_text(made.text)
    config = load_config(tmp_path / "ours.yaml")
    assert config.objective.type == "completion" and config.data.mask_documents
    prepare = config.data.prepare
    assert prepare is not None and prepare.chat is not None
    assert (prepare.packing, prepare.chat.targets, prepare.chat.prompts) == ("best_fit", "all", "length>=100")
    assert prepare.tokenizer == "our-org/our-tokenizer" and prepare.validation_fraction == 0
    assert left(made) == {"split"} and not config.data.validation_streams()


@pytest.mark.parametrize(
    "dataset, sources",
    [
        ({}, ["hf://datasets/our-org/chats/**/train*"]),
        ({"split": "sft"}, ["hf://datasets/our-org/chats/**/sft*"]),
        ({"hf_name": "/data/chats/"}, ["/data/chats/**/train*"]),
        ({"hf_kwargs": {"data_dir": "en"}}, ["hf://datasets/our-org/chats/en/**/train*"]),
        (
            {"hf_kwargs": {"data_files": ["a.jsonl", "b.jsonl"]}},
            [f"hf://datasets/our-org/chats/{n}.jsonl" for n in "ab"],
        ),
        ({"hf_name": "json", "hf_kwargs": {"data_files": {"train": "/x/a.jsonl"}}}, ["/x/a.jsonl"]),
    ],
)
def test_sources(tmp_path, dataset, sources):
    assert prepare_of(finetuning(tmp_path, dataset))["sources"] == sources


@pytest.mark.parametrize(
    "dataset, chat, notes",
    [
        ({}, {"targets": "last"}, set()),
        ({"preprocessing_fn": {"prompt": "q", "response": "a"}}, {"fields": {"prompt": "q", "completion": "a"}}, set()),
        ({"hf_name": "bigscience/P3"}, {"fields": {"prompt": "inputs", "completion": "targets"}}, set()),
        ({"hf_name": "tatsu-lab/alpaca"}, {"format": "alpaca"}, {"preprocessing_fn"}),
        ({"hf_name": "tatsu-lab/alpaca", "preprocessing_fn": "a:b"}, {"format": "alpaca"}, {"preprocessing_fn"}),
        ({"target_prompts": "all"}, {"prompts": "all"}, set()),
        ({"target_prompts": "length >= 7"}, {"prompts": "length>=7"}, set()),
        ({"hf_kwargs": {"token": "x"}}, {}, {"hf_kwargs.token"}),
    ],
)
def test_preprocessing_and_targets(tmp_path, dataset, chat, notes):
    made = finetuning(tmp_path, dataset)
    assert prepare_of(made)["chat"] == {"targets": "last"} | chat
    assert left(made) == {"split"} | notes


@pytest.mark.parametrize("ratio, packing", [(None, "padded"), (1, "padded"), (2.5, "best_fit"), ("auto", "best_fit")])
def test_packing(tmp_path, ratio, packing):
    assert prepare_of(finetuning(tmp_path, {"packing_ratio": ratio}))["packing"] == packing


@pytest.mark.parametrize(
    "dataset, where, reason",
    [
        (
            {"preprocessing_fn": "my.module:prepare"},
            "preprocessing_fn",
            "a function of Python, which llmtrain does not run",
        ),
        ({"hf_name": None}, "hf_name", "is missing; it names the records"),
        ({"hf_name": None, "remote": "s3://x"}, "remote", "give data.prepare.sources the records"),
        ({"target_responses": "some"}, "target_responses", "expected last or all"),
        ({"target_prompts": "length>=x"}, "target_prompts", "expected none, all or length>=N"),
        ({"packing_ratio": "much"}, "packing_ratio", "expected a number or auto"),
        ({"decoder_only_format": False}, "decoder_only_format", "llmtrain has decoders alone"),
    ],
)
def test_what_has_no_equal_is_refused_with_a_remedy(tmp_path, dataset, where, reason):
    with pytest.raises(ConfigError, match=reason) as raised:
        finetuning(tmp_path, dataset)
    assert [problem.path for problem in raised.value.problems] == [f"train_loader.dataset.{where}"]
    with pytest.raises(ConfigError, match="records are prepared with it"):
        finetuning(tmp_path, {}, **{"tokenizer.name": None})


def test_validation_is_held_out_of_the_records(tmp_path):
    loader = {"name": "finetuning", "dataset": DATASET | {"split": "test"}}
    made = finetuning(tmp_path, {}, eval_interval="20ba", eval_loader=loader)
    assert "validation_fraction" not in prepare_of(made) and left(made) == {"split", "eval_loader"}
    off = finetuning(tmp_path, {}, eval_loader=loader)
    assert prepare_of(off)["validation_fraction"] == 0 and left(off) == {"split"}


LORA = {"r": 16, "peft_type": "LORA", "task_type": "CAUSAL_LM", "lora_alpha": 32, "lora_dropout": 0.05}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"target_modules": "all-linear"}, {}),
        ({"target_modules": ["Wqkv", "down_proj"]}, {"targets": ["*.wqkv", "*.mlp.w_out"]}),
        (
            {"target_modules": ["up_proj"], "rank_pattern": {"up_proj": 4}, "use_rslora": True},
            {"targets": ["*.mlp.w_in"], "groups": [{"match": "*.mlp.w_in", "rank": 4}], "rslora": True},
        ),
        ({"target_modules": ["Wqkv"], "bias": "none", "modules_to_save": None}, {"targets": ["*.wqkv"]}),
    ],
)
def test_adapters_of_peft_are_ours(tmp_path, given, expected):
    made = finetuning(tmp_path, {}, **{"model.peft_config": LORA | given})
    (tmp_path / "ours.yaml").write_text(made.text)
    config = load_config(tmp_path / "ours.yaml")
    assert config.adapt is not None and config.adapt.lora is not None
    found = config.adapt.lora.model_dump(mode="json", exclude_defaults=True)
    assert found == {"rank": 16, "alpha": 32, "dropout": 0.05} | expected and "model.peft_config" not in left(made)
    meta_model(config.model, config.adapt)  # its names are there


@pytest.mark.parametrize(
    "given",
    [
        {"target_modules": ["Wqkv"], "peft_type": "IA3"},
        {"target_modules": ["c_attn"]},
        {"target_modules": ["Wqkv"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["Wqkv"], "rank_pattern": {"layers.1.Wqkv": 2}},
        {},
    ],
)
def test_adapters_that_are_not_here_are_left_to_decide(tmp_path, given):
    made = finetuning(tmp_path, {}, **{"model.peft_config": LORA | given})
    assert "adapt" not in made.sections and "model.peft_config" in left(made)
