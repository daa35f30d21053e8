"""`llmtrain generate`: a completion, or a plain word on why there is none."""

from __future__ import annotations

import pytest

from llmtrain.cli import main
from tests.support.project import copy_of


def test_generate_continues_a_prompt_with_the_trained_run(finished, capsys):
    project, _ = finished
    for path in (project.run_dir, project.run_dir / "checkpoints" / "step-00000006"):
        assert main(["generate", str(path), "--prompt", "the quick", "--max-new-tokens", "8"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("the quick") and len(text.strip()) > len("the quick")


@pytest.mark.parametrize("broken", ["no such folder", "no checkpoint", "not whole"])
def test_generate_says_when_there_is_nothing_to_load(finished, tmp_path, capsys, broken):
    path = tmp_path / "none"
    if broken == "no checkpoint":
        path.mkdir()
    elif broken == "not whole":
        path = copy_of(finished, tmp_path).run_dir
        (path / "checkpoints" / "step-00000006" / "manifest.json").unlink()
    assert main(["generate", str(path), "--prompt", "x"]) == 2
    captured = capsys.readouterr()
    assert f"{path} holds no complete checkpoint" in captured.err
    assert ("no manifest.json" in captured.out) == (broken == "not whole")


@pytest.mark.parametrize("option", [["--temperature=-1"], ["--top-k", "0"], ["--max-new-tokens", "0"]])
def test_generate_refuses_impossible_options(option, capsys):
    assert main(["generate", "run", "--prompt", "x", *option]) == 2
    message = capsys.readouterr().err
    assert option[0].partition("=")[0] in message and "must be at least" in message
