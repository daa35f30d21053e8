"""Evaluation YAMLs of LLM Foundry: models and tasks are carried over, and what has no equal is named."""

from pathlib import Path

import pytest
import yaml

from llmtrain.config.report import ConfigError
from llmtrain.convert.foundry.migrate import Migration, migrate
from llmtrain.eval.run_config import load_eval_run
from llmtrain.schema.load import load_config
from tests.support.foundry import TASKS

LENGTH = "${variables.length}"
MODEL = {
    "model_name": "our-org/our-model",
    "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "our-org/our-model", "init_device": "mixed"},
    "tokenizer": {"name": "our-org/our-model", "kwargs": {"model_max_length": LENGTH}},
}
LIST = [
    {"label": "lambada_openai", "num_fewshot": [0]},
    {"label": "arc_easy", "num_fewshot": [0, 5]},
    {"label": "riddles"},
]
FILE = {
    "variables": {"length": 512},
    "max_seq_len": LENGTH,
    "precision": "amp_bf16",
    "models": [MODEL],
    "device_eval_batch_size": 4,
    "fsdp_config": {"sharding_strategy": "FULL_SHARD"},
    "icl_tasks": LIST,
}


def made(folder: Path, content: dict) -> Migration:
    (folder / "theirs.yaml").write_text(yaml.safe_dump(content))
    found = migrate(folder / "theirs.yaml", TASKS)
    (folder / "ours.yaml").write_text(found.text)
    return found


def test_models_and_tasks_are_carried_over(tmp_path):
    found = made(tmp_path, FILE)
    run = load_eval_run(tmp_path / "ours.yaml")
    [model] = run.chosen_models()
    assert (str(model.path), model.title, model.tokenizer) == ("our-org/our-model", "our-model", None)
    assert (run.convention, run.max_length, run.dtype) == ("foundry", 512, "bfloat16")
    assert found.sections["tasks"] == [{"task": "lambada", "shots": [0]}, {"task": "arc_easy", "shots": [0, 5]}]
    assert [(note.path, "riddles" in note.text) for note in found.notes.left] == [("icl_tasks", True)]
    assert found.text.startswith("# yaml-language-server: $schema=eval/schema.json")


def test_a_list_of_tasks_needs_a_model_alone(tmp_path):
    assert not made(tmp_path, {"icl_tasks": LIST[:2]}).notes.left
    assert len(load_eval_run(tmp_path / "ours.yaml", ["model=runs/a"]).tasks) == 2


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"eval_gauntlet": "eval/yamls/eval_gauntlet_v0.3.yaml"}, "eval_gauntlet", "`gauntlet: core`"),
        ({"eval_loader": {"name": "text"}}, "eval_loader", "type perplexity"),
        ({"eval_subset_num_batches": 20}, "eval_subset_num_batches", "`limit: N`"),
        ({"models": [MODEL | {"load_path": "a/ep0-ba1-rank0.pt"}]}, "models.0.load_path", "checkpoint convert"),
        ({"models": [MODEL, {"model_name": "x", "model": {"name": "openai_causal_lm"}}]}, "models.1.model", "no model"),
        ({"models": [{"model_name": "x"}]}, "models.0.model", "names no model"),
        (
            {"models": [MODEL | {"model": MODEL["model"] | {"pretrained_lora_id_or_path": "a/b"}}]},
            "models.0.model.pretrained_lora_id_or_path",
            "merged into it first",
        ),
    ],
)
def test_what_has_no_equal_is_left_to_decide(tmp_path, changes, path, words):
    left = {note.path: note.text for note in made(tmp_path, FILE | changes | {"icl_tasks": LIST[:2]}).notes.left}
    assert list(left) == [path] and words in left[path]


def test_a_gauntlet_alone_and_a_wrong_command_are_named(tmp_path):
    gauntlet = {"eval_gauntlet": {"categories": [{"name": "x", "benchmarks": [{"name": "riddles"}]}]}}
    with pytest.raises(ConfigError, match="with no model and no task that ours has too"):
        made(tmp_path, gauntlet)
    with pytest.raises(ConfigError, match=r"models\.0 .*expected a mapping"):
        made(tmp_path, FILE | {"models": [3, MODEL]})
    for load in (load_config, load_eval_run):
        with pytest.raises(ConfigError, match="is an evaluation YAML of LLM Foundry; `llmtrain migrate"):
            load(tmp_path / "theirs.yaml", [])
