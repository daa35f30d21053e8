"""`llmtrain eval` with chat templates: settings, results, stored answers and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.data.chat import template
from llmtrain.data.tokenize.tokenizer import load_tokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.chat import ChatTemplate, chat_template
from tests.support.evaluation import Place
from tests.support.icl import byte_level

TEMPLATE = """\
{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] }}
{% endfor %}{% if add_generation_prompt %}so:{% endif %}"""
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    made = Place(tmp_path_factory.mktemp("chat"), documents=6)
    (made.folder / "chat.jinja").write_text(TEMPLATE)
    (made.folder / "no_system.jinja").write_text(NO_SYSTEM)
    return made


def rows(place: Place, out: Path, **changes: Any) -> list[dict[str, Any]]:
    settings = {"tasks": [place.tasks[0], place.tasks[3]]} | changes
    assert main(["eval", str(place.write(settings)), f"out={out}"]) == 0
    return json.loads((out / "results.json").read_text())["results"]


def refused(place: Place, out: Path, capsys, **changes: Any) -> str:
    capsys.readouterr()
    assert main(["eval", str(place.write(changes)), f"out={out}"]) == 2
    return capsys.readouterr().err


def test_results_name_the_template_and_answers_are_not_mixed(place, tmp_path):
    file = str(place.folder / "chat.jinja")
    chat = {"path": str(place.model), "name": "chat", "chat_template": file, "system_instruction": "Be brief."}
    plain = rows(place, tmp_path)
    both = rows(place, tmp_path, models=[str(place.model), chat])
    assert [one["asked"] for one in plain] == [6, 6, 2]
    assert [one["asked"] for one in both] == [0, 0, 0, 6, 6, 0]  # a text's perplexity has no template
    style = {
        "chat_template": file,
        "chat_template_digest": chat_template(byte_level(), file).digest,  # type: ignore[union-attr]
        "system_instruction": "Be brief.",
        "system_turn_refused": False,
        "fewshot_as_multiturn": True,
    }
    assert [one["style"] for one in both] == [None, None, None, style, style, None]
    assert [one["value"] for one in both[:3]] == [one["value"] for one in plain]
    assert both[3]["metrics"] != both[0]["metrics"] and both[5]["value"] == both[2]["value"]
    note = f"- chat: prompts in the chat template {file} (digest {style['chat_template_digest']}), "
    assert (
        note + "the system instruction 'Be brief.', few-shot examples as turns."
        in (tmp_path / "results.md").read_text()
    )
    one_turn = rows(place, tmp_path, chat_template=file, system_instruction="Be brief.", fewshot_as_multiturn=False)
    assert [one["asked"] for one in one_turn] == [0, 6, 0]  # without examples, the same prompts
    assert one_turn[1]["style"] == style | {"fewshot_as_multiturn": False}


def test_a_template_without_a_system_turn_is_given_the_rest(place, tmp_path, capsys):
    file = str(place.folder / "no_system.jinja")
    rows(place, tmp_path, chat_template=file)
    found = rows(place, tmp_path, chat_template=file, system_instruction="Be brief.")
    assert [one["asked"] for one in found] == [0, 0, 0]
    assert (
        capsys.readouterr().err.count(f"chat template {file}: no system here; prompts go without their system turn")
        == 1
    )
    assert found[0]["style"]["system_turn_refused"] is True
    assert "), without the system turn, which it refuses, few-shot" in (tmp_path / "results.md").read_text()


def test_a_document_that_the_template_refuses_may_be_left_out(place, tmp_path, capsys):
    refused_one = json.loads((place.folder / "choice.jsonl").read_text().splitlines()[2])["query"]
    file = place.folder / "picky.jinja"
    file.write_text(
        f"{{% if messages[-1].content == {refused_one!r} %}}{{{{ raise_exception('not this') }}}}{{% endif %}}"
        + TEMPLATE
    )
    choice: Any = {"tasks": [{"task": place.tasks[0], "shots": [0]}], "chat_template": str(file)}
    said = refused(place, tmp_path, capsys, **choice)
    assert f"choice.jsonl:3: chat template {file}: not this (skip_bad_documents: true leaves out" in said
    [found] = rows(place, tmp_path, skip_bad_documents=True, **choice)
    assert (found["documents"], found["skipped"]) == (5, 1)


def test_what_is_refused(place, tmp_path, capsys):
    folder = place.model / "checkpoints" / "step-00000001" / "tokenizer"
    said = refused(place, tmp_path, capsys, chat_template=True)
    assert f"tiny: chat_template: the tokenizer has none: {folder}/tokenizer_config.json has no `chat_template`" in said
    assert "chat_template.jinja is not beside it; give the path of a Jinja file" in said
    said = refused(place, tmp_path, capsys, models=[{"path": str(place.model), "chat_template": "nowhere.jinja"}])
    assert "models.0.chat_template" in said and "there is no such file" in said
    said = refused(place, tmp_path, capsys, convention="foundry", chat_template=True, system_instruction="x")
    assert "chat_template" in said and "system_instruction" in said and "set convention: lm-eval" in said
    assert "chat_template  line 1  expected true, false or the path" in refused(
        place, tmp_path, capsys, chat_template=3
    )
    for text, reason in (
        ("{% for %}", "line 1"),
        ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
        ("Answer briefly.", "does not contain the question"),
    ):
        (tmp_path / "broken.jinja").write_text(text)
        said = refused(place, tmp_path, capsys, chat_template=str(tmp_path / "broken.jinja"))
        assert f"chat template {tmp_path}/broken.jinja: " in said and reason in said and "Traceback" not in said


def test_a_tokenizers_own_template(tmp_path):
    """chat_template.jinja goes before tokenizer_config.json, where several have names; saving keeps both."""
    byte_level().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())

    def own(template: Any) -> str:
        config.write_text(json.dumps(settings | {"chat_template": template}))
        found = chat_template(load_tokenizer(tmp_path), True)
        assert found is not None
        return found.text

    assert own(TEMPLATE) == TEMPLATE
    assert own([{"name": "tools", "template": "x"}, {"name": "default", "template": NO_SYSTEM}]) == NO_SYSTEM
    with pytest.raises(
        EvalError, match=r"tokenizer_config.json has several \(rag, tools\), none of them named default"
    ):
        own([{"name": "tools", "template": "x"}, {"name": "rag", "template": "y"}])
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE + "!")
    assert own(NO_SYSTEM) == TEMPLATE + "!"
    load_tokenizer(tmp_path).save(tmp_path / "copy")
    copied = load_tokenizer(tmp_path / "copy")
    assert (copied.chat_template, copied.config["chat_template"]) == (TEMPLATE + "!", NO_SYSTEM)


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("llmtrain.data.chat.template.DOCUMENT_SECONDS", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(EvalError, match=r"chat template x took longer than 0\.3 s"):
        ChatTemplate(template.ChatTemplate(endless, {}, "x"))
