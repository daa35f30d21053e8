"""`llmtrain generate`: completions of a prompt, a file or a pipe, or a plain word on why there are none."""

import io
import json
import sys

import pytest

from llmtrain.cli import main
from tests.support import checkpoints
from tests.support.project import copy_of


def generate(capsys, *arguments: object) -> str:
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def run(finished):
    return finished[0].run_dir


def test_a_run_or_a_checkpoint_continues_a_prompt(run, capsys):
    for path in (run, run / "checkpoints" / "step-00000006"):
        text = generate(capsys, path, "--prompt", "the quick", "--max-new-tokens", 8)
        assert text.startswith("the quick") and len(text.strip()) > len("the quick")


def test_a_model_trained_by_kernels_that_this_machine_has_not_applies_too(tmp_path, capsys):
    plain = checkpoints.mpt(64, 2, 270)
    texts = []
    for name, config in (("plain", plain), ("ours", plain.with_backends("triton", lambda *block: "triton"))):
        checkpoints.save(tmp_path / name, config)
        texts.append(generate(capsys, tmp_path / name, "--prompt", "the", "--max-new-tokens", 8, "--temperature", 0))
    assert texts[0] == texts[1]


def test_the_same_seed_states_the_same_and_another_something_else(run, capsys):
    said = [generate(capsys, run, "--prompt", "the", "--max-new-tokens", 24, "--seed", s) for s in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_a_file_of_prompts_is_answered_in_order_whatever_the_batches(run, tmp_path, capsys):
    prompts = ["the quick brown", "a\u2028b\x85c\x0cd", "fox jumps over the lazy dog", ""]
    (tmp_path / "prompts.txt").write_text("\ufeff" + "\n".join(prompts) + "\n")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "id": 3}, ensure_ascii=False) + "\n" for p in prompts)
    )
    said = [
        generate(capsys, run, "--file", tmp_path / name, "--batch-size", size, "--max-new-tokens", 12)
        for name, size in (("prompts.txt", 32), ("prompts.jsonl", 2))
    ]
    assert said[0] == said[1]
    answers = [json.loads(line) for line in said[0].removesuffix("\n").split("\n")]
    assert [answer["prompt"] for answer in answers] == prompts
    assert {answer["end"] for answer in answers} <= {"length", "eod"}
    assert any(answer["completion"] for answer in answers)


def test_a_pipe_is_one_prompt(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick\nbrown"))
    assert generate(capsys, run, "--max-new-tokens", 4).startswith("the quick\nbrown")


def test_a_stop_string_ends_the_answer(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("the quick")
    options = ["--file", tmp_path / "p.txt", "--temperature", 0, "--max-new-tokens", 16]
    whole = json.loads(generate(capsys, run, *options))["completion"]
    stop = whole[3:6]
    answer = json.loads(generate(capsys, run, *options, "--stop", stop))
    assert answer["completion"] == whole[: whole.find(stop)] and answer["end"] == "stop"


def test_a_folder_without_a_checkpoint_is_named(tmp_path, capsys):
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert f"{tmp_path} holds no checkpoint" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_not_whole_is_named(finished, tmp_path, capsys):
    path = copy_of(finished, tmp_path).run_dir
    (path / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    assert main(["generate", str(path), "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert "no manifest.json" in said and f"{path}: none of its checkpoints is complete" in said


def test_a_name_that_is_nothing_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["generate", "./no/such/run", "--prompt", "x"]) == 2
    assert "./no/such/run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (["--temperature=-1"], "temperature"),
        (["--top-k", "0"], "top_k"),
        (["--top-p", "2"], "top_p"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--max-new-tokens", "99999999999"], "--max-new-tokens and --batch-size are at most 1,048,576"),
        (["--stop", ""], "--stop"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(option, named, capsys):
    assert main(["generate", "run", "--prompt", "x", *option]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "p.jsonl:2: expected an object with a text"),
        ("p.jsonl", "the quick\n", "p.jsonl:1: expected"),
        ("p.jsonl", '{"prompt": "a\\ud800b"}\n', r"'\ud800', character 2 of 'a\ud800b', is half of a UTF-16 pair"),
        ("missing.txt", None, "cannot read prompts from"),
    ],
)
def test_a_bad_file_of_prompts_is_refused_with_its_line(run, tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["generate", str(run), "--file", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err
