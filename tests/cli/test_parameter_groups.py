"""`optimizer.groups` in `check` and `describe`."""

import json

import pytest

from llmtrain.cli import main

RUN = {
    "name": "groups",
    "model": {
        "vocab_size": 512,
        "d_model": 64,
        "max_seq_len": 64,
        "blocks": {"m": {"type": "mamba2", "d_state": 16, "head_dim": 32}},
        "layers": "m*2",
    },
    "data": {"seq_len": 64, "prepare": {"sources": ["stdlib"], "out": "shards", "vocab_size": 512, "seq_len": 64}},
    "train": {"duration": "30 steps", "global_batch_size": 8, "microbatch_size": 8},
}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(verb, groups, *arguments) -> (exit status, what a user sees)."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, groups: list, *arguments: str) -> tuple[int, str]:
        (tmp_path / "run.yaml").write_text(json.dumps(RUN | {"optimizer": {"lr": 0.01, "groups": groups}}))
        status = main([verb, "run.yaml", *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.mark.parametrize(
    ("groups", "path", "message"),
    [
        ([{"match": "*.A_lgo", "lr": 1e-3}], "optimizer.groups.0.match", "matches no parameter"),
        (
            [{"match": "*.A_log", "lr": 1e-3}, {"match": "*", "lr_factor": 0.5}],
            "optimizer.groups.0.match",
            "has no effect on lr",
        ),
        ([{"match": "*", "lr": 1e-3, "lr_factor": 0.5}], "optimizer.groups.0.lr_factor", "give one of them"),
        ([{"match": "*"}], "optimizer.groups.0.match", "add lr, lr_factor or weight_decay"),
        ([{"match": "*", "lr": -1}], "optimizer.groups.0.lr", "at least 0"),
        ([{"match": "*", "rate": 1}], "optimizer.groups.0.rate", "unknown key"),
        ([{"match": "", "lr": 1}], "optimizer.groups.0.match", "a string"),
    ],
)
def test_check_refuses_entries_that_cannot_be_meant(command, groups, path, message):
    status, text = command("check", groups)
    assert status == 2
    assert path in text and message in text


def test_check_accepts_entries_that_match(command):
    status, text = command("check", [{"match": "*.A_log", "lr_factor": 0.5}, {"match": "embed.*", "weight_decay": 0}])
    assert status == 0, text


def test_describe_counts_what_each_entry_matches(command):
    groups = [{"match": "blocks.*", "lr": 0.002}, {"match": "*.A_log", "weight_decay": 0.5}]
    status, text = command("describe", groups, "--json")
    assert status == 0
    found = [
        (group["matched"], group["tensors"], group["lr"], group["weight_decay"])
        for group in json.loads(text)["parameter_groups"]
    ]
    assert ([], 1, 0.01, 0.1) in found and ([], 1, 0.01, 0.0) in found  # the embedding, the last norm
    assert (["blocks.*", "*.A_log"], 2, 0.002, 0.5) in found
    total = sum(group["parameters"] for group in json.loads(text)["parameter_groups"])
    assert total == json.loads(text)["total_parameters"]


def test_describe_shows_them_and_the_rule_of_overlaps(command):
    _, text = command("describe", [{"match": "blocks.*", "lr": 0.002}])
    text = " ".join(text.split())  # the terminal's width says where lines break
    assert "blocks.*" in text and "0.002" in text and "that of the last entry which gives it" in text
    _, without = command("describe", [])
    assert "Parameter groups" not in without


def test_describe_refuses_what_check_refuses(command):
    status, text = command("describe", [{"match": "*.A_lgo", "lr": 1e-3}])
    assert status == 2 and "matches no parameter" in text
