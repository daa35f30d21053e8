"""`llmtrain migrate`, and what the other commands say about a YAML of LLM Foundry."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from streaming import MDSWriter

from llmtrain.cli import main
from tests.support.foundry import FULL, changed


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(*words) -> (exit status, stdout, stderr), in a folder with foundry.yaml and the shards it names."""
    monkeypatch.chdir(tmp_path)
    Path("foundry.yaml").write_text(yaml.safe_dump(changed({"variables.shards": "books"})))

    def command(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards as LLM Foundry writes them: a column of tokens, and neither manifest nor tokenizer."""
    folder = tmp_path_factory.mktemp("foundry") / "books"
    for split in ("train", "held_out"):
        with MDSWriter(out=str(folder / split), columns={"tokens": "ndarray:int32"}) as writer:
            for i in range(48):
                writer.write({"tokens": np.arange(i, i + 64, dtype=np.int32)})
    return folder


def test_the_output_is_a_config_that_runs_on_the_same_shards(run, shards):
    Path("books").symlink_to(shards)
    status, text, errors = run("migrate", "foundry.yaml", "--strict")
    assert (status, errors) == (0, "")
    Path("ours.yaml").write_text(text)
    status, text, errors = run("check", "ours.yaml", "--nproc", "3")
    assert (status, errors) == (0, "")
    assert "3 layers (3 attention), d_model 96; 100 steps of 24 sequences x 64 tokens" in text


def test_what_is_left_is_on_stderr_with_a_count_and_strict_fails(run):
    Path("foundry.yaml").write_text(yaml.safe_dump(changed({"model.logit_scale": 0.5, "frobnicate": 3})))
    status, text, errors = run("migrate", "foundry.yaml")
    assert status == 0 and errors.startswith("foundry.yaml: 2 left to decide")
    for line in ("model.logit_scale: 0.5 – logits are not scaled", "frobnicate: 3 – is no key of LLM Foundry's"):
        assert line in errors and line in text
    status, strict, errors = run("migrate", "foundry.yaml", "--strict")
    assert status == 1 and strict == text and "--strict" in errors


def test_tasks_go_to_a_file_of_their_own(run):
    tasks = [{"label": "arc_easy", "num_fewshot": [3]}]
    Path("foundry.yaml").write_text(yaml.safe_dump(changed({"icl_tasks": tasks})))
    status, text, _ = run("migrate", "foundry.yaml", "--icl", "tasks.yaml")
    assert status == 0 and "file: tasks.yaml" in text
    assert yaml.safe_load(Path("tasks.yaml").read_text())["tasks"] == [{"task": "arc_easy", "shots": [3]}]
    status, text, errors = run("migrate", "foundry.yaml", "--icl", "tasks.yaml")
    assert (status, text) == (2, "") and "such a file already" in errors


@pytest.mark.parametrize("verb", ["check", "describe", "train", "eval"])
def test_other_commands_name_this_one(verb, run):
    status, text, errors = run(verb, "foundry.yaml")
    assert (status, text) == (2, "")
    assert errors == (
        "foundry.yaml: is a YAML of LLM Foundry; `llmtrain migrate foundry.yaml > ours.yaml` translates it\n"
    )


@pytest.mark.parametrize("text", ["", "a: 1\n", "name: x\ntrain: {}\nmodel: {}\n", "models: []\nicl_tasks: x\n"])
def test_what_is_no_yaml_of_llm_foundrys_is_refused(text, run):
    Path("other.yaml").write_text(text)
    status, out, errors = run("migrate", "other.yaml")
    assert (status, out) == (2, "") and errors.startswith("other.yaml: is ")


def test_a_file_with_faults_names_their_lines(run):
    Path("foundry.yaml").write_text(FULL.replace("d_model: 96", "d_model: wide"))
    status, out, errors = run("migrate", "foundry.yaml")
    assert (status, out) == (2, "") and "model.d_model  line 10  'wide': expected an integer" in errors
