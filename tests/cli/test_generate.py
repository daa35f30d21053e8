"""`llmtrain generate`: completions of a prompt, a file or a pipe, or a plain word on why there are none."""

import io
import json
import re
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


def test_weights_in_8_bits_continue_a_prompt_as_before_each_time(run, capsys):
    options = ("--prompt", "the quick", "--max-new-tokens", 8, "--temperature", 0, "--weights", "int8")
    assert main(["generate", str(run), *map(str, options)]) == 0
    first = capsys.readouterr()
    assert re.search(r"weights in int8: [\d.]+ MiB of linear layers are [\d.]+; [\d.]+ MiB of others stay", first.err)
    assert first.out.startswith("the quick") and generate(capsys, run, *options) == first.out


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


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Texts of the ids that the model reads, from here on."""
    from llmtrain.generate import text

    found, complete = [], text.complete

    def spy(model, tokenizer, prompts, *options, **further):
        found.extend(prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts)
        return complete(model, tokenizer, prompts, *options, **further)

    monkeypatch.setattr(text, "complete", spy)
    return found


def chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_chat_is_written_by_the_template_and_its_answer_printed_alone(run, tmp_path, asked, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Where?"}\n{"prompt": "When?"}\n')
    options = ["--chat", "--chat-template", "chatml", "--max-new-tokens", 4, "--temperature", 0]
    printed = generate(capsys, run, *options, "--prompt", "Where?", "--system", "Be brief.")
    answers = [
        json.loads(line) for line in generate(capsys, run, *options, "--file", tmp_path / "p.jsonl").splitlines()
    ]
    start = "<|im_start|>assistant\n"
    alone = [chatml("user", one) + start for one in ("Where?", "When?")]
    assert asked == [chatml("system", "Be brief.") + alone[0], *alone]
    assert "Where?" not in printed and [one["prompt"] for one in answers] == ["Where?", "When?"]


def test_what_is_typed_goes_on_with_the_conversation(run, asked, monkeypatch, capsys):
    monkeypatch.setattr("llmtrain.commands.generate._typed", lambda: iter(["One?", "Two?"]))
    generate(capsys, run, "--chat", "--chat-template", "chatml", "--max-new-tokens", 3, "--temperature", 0)
    first, second = asked
    begun = chatml("user", "One?") + "<|im_start|>assistant\n"
    assert (
        first == begun
        and second.startswith(begun)
        and second.endswith(chatml("user", "Two?") + "<|im_start|>assistant\n")
    )
    assert len(second) > len(begun + chatml("", "") + chatml("user", "Two?"))


def test_a_chat_without_a_template_is_refused(run, capsys):
    assert main(["generate", str(run), "--chat", "--prompt", "x"]) == 2
    assert "chat_template: the tokenizer has none" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path, capsys):
    checkpoints.save(tmp_path / "small", checkpoints.mpt(64, 2, 97))
    checkpoints.tokenizer().save(tmp_path / "tokenizer")
    assert main(["generate", str(tmp_path / "small"), "--tokenizer", str(tmp_path / "tokenizer"), "--prompt", "x"]) == 2
    assert "small: the tokenizer has 270 tokens, the model 97; name the one" in capsys.readouterr().err


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
        (["--max-new-tokens", "99999999999"], "--max-new-tokens 99999999999: expected at most 1048576"),
        (["--stop", ""], "--stop"),
        (["--system", "Be brief."], "--system goes with --chat"),
        (["--chat-template", "chatml"], "--chat-template goes with --chat"),
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
