"""YAMLs by name: those that llmtrain brings, from any folder, behind the user's own."""

from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.config.report import ConfigError
from llmtrain.config.shipped import ROOT, configs, find_config
from llmtrain.eval.run_config import load_eval_run
from llmtrain.schema.load import load_config

FILES = [*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "eval").glob("*.yaml")]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_config(file)
    return str(caught.value)


def test_every_shipped_yaml_has_a_name():
    assert FILES and set(configs().values()) == set(FILES)
    assert configs()["mamba2-1.3b"] == configs()["pretrain/mamba2-1.3b"] == ROOT / "yamls/pretrain/mamba2-1.3b.yaml"
    assert configs()["quick"] == ROOT / "eval/quick.yaml"


def test_a_short_name_in_two_folders_is_that_of_pretrain():
    assert configs()["mpt-1b"] == ROOT / "yamls/pretrain/mpt-1b.yaml"
    assert configs()["bench/mpt-1b"] == ROOT / "yamls/bench/mpt-1b.yaml"


def test_names_load_from_an_empty_folder(capsys):
    assert load_config("mpt-1b").name == "mpt-1b"
    assert load_eval_run("quick", needs_models=False).name == "quick"
    assert main(["check", "quickstart"]) == 0
    assert capsys.readouterr().out.startswith(f"quickstart ({ROOT / 'yamls/quickstart.yaml'}): OK, 6 layers")


def test_errors_name_the_file_behind_a_name():
    with pytest.raises(ConfigError, match=r"^quickstart \(.*quickstart.yaml\): 1 error\n  optimizer.lr +override"):
        load_config("quickstart", ["optimizer.lr=fast"])


@pytest.mark.parametrize("own", ["quickstart", "quickstart.yaml", "quickstart.yml"])
def test_a_file_of_the_user_comes_first(own):
    Path(own).touch()
    assert find_config("quickstart") == Path(own)


def test_a_folder_of_that_name_is_not_in_the_way():
    Path("quickstart").mkdir()
    assert find_config("quickstart") == ROOT / "yamls/quickstart.yaml"


def test_an_unknown_name_is_reported_the_near_ones_or_all():
    assert refusal("mpt-1") == (
        "mpt-1: is neither a file nor the name of a YAML that llmtrain brings; did you mean mpt-1b or mpt-13b?"
    )
    Path("my-run.yaml").touch()
    assert refusal("mi-run").endswith("; did you mean my-run?")
    text = refusal("rather-other")
    assert ", quickstart," in text and "bench/mpt-1b, " in text and "pretrain/mpt-1b" not in text


def test_a_name_that_no_file_can_have_is_refused_too():
    assert "is neither a file nor the name" in refusal("x" * 5000)


@pytest.mark.parametrize(
    "path,name",
    [
        ("quickstart.yaml", "quickstart"),
        ("yamls/pretrain/mpt-1b.yaml", "pretrain/mpt-1b"),
        ("yamls/bench/mpt-1b.yaml", "bench/mpt-1b"),
        ("eval/quick.yaml", "quick"),
    ],
)
def test_a_path_into_a_checkout_that_is_not_here_is_reported_the_name(path, name):
    assert refusal(path) == f"{path}: no such file; llmtrain brings one of that name, which is found as {name}"
