"""Checks of IFEval's instructions against those of lm-evaluation-harness, on answers made to be hard; and a whole task."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.eval import instructions
from llmtrain.eval.instructions import read_instruction
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.report.document_scores import read_lines
from llmtrain.eval.tasks.sections import Source
from tests.support import icl
from tests.support.evaluation import Place
from tests.support.punkt import write_punkt

NEEDED = ("lm_eval", "nltk", "langdetect", "immutabledict")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs lm_eval, nltk, langdetect and immutabledict, of the development dependencies",
)

WORDS = (
    "apple", "Apples", "HOTEL", "rock", "Rock-and-roll", "it's", "I", "naïve", "Straße", "ΣΑΣ", "中文", "привет", "a1",
    "u.s.",
)  # fmt: skip
MARKS = (
    ".", "!", "?", ",", ";", " ", " ", " ", "\n", "\n\n", "***", " *** ", "******", "*", "**", '"', "'", "-", "\n- ",
    "\n* ",
)  # fmt: skip
PIECES = (
    *(
        "[name]",
        "[]",
        "[a [b]",
        "P.S. done",
        "p. s. x",
        "P.P.S",
        "p.p.s.",
        "Section 1",
        "SECTION 2",
        "section3",
        "Day 1\n",
    ),
    *(
        "*bold*",
        "**bold**",
        "* *",
        "<<title>>",
        "<<>>",
        "<< >>",
        "<<a\nb>>",
        "My answer is yes.",
        "my answer is no.",
        "maybe",
    ),
    *(
        '{"a": [1]}',
        "```json\n{}\n```",
        "```\n[]```",
        "```",
        "{'a': 1}",
        "Any other questions?",
        "Write a poem.",
        "the end",
    ),
    *("This is an English sentence.", "ein deutscher Satz über das Wetter", "Mr. Smith went. However, he came."),
)
PLAIN = (
    *("THIS IS ALL CAPITAL ENGLISH TEXT ABOUT THE WEATHER.", "this is a small text about the weather in the north"),
    *(
        "Dies ist ein deutscher Satz über das Wetter.",
        "Ceci est une phrase en français.",
        "one\n******\ntwo",
        '{"a": 1}',
    ),
    *(
        "apple rock\n\nI\n\nhotel",
        "Apples, and a rock.\n\n'Rock' it\n\n\n\nend",
        "a\n***\nb",
        "***\na\n***\nb ***c***",
        '"Yes"',
    ),
    *(
        "```json\n[1, 2]\n```",
        "same ****** same",
        "****** a ****** b",
        "a ****** ****** b",
        "* one\n* two\n- three\n** four",
    ),
)
RELATIONS = ("less than", "at least")


def kinds(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Every kind of instruction with random arguments."""
    small, relation = rng.randint(1, 4), rng.choice(RELATIONS)
    word = rng.choice(("apple", "rock", "hotel", " it's ", "r.ck", "中文"))
    paragraphs, nth, first = rng.choice(
        ((3, 1, "apple"), (3, 1, "Apples"), (3, 2, "rock"), (1, 1, "ΣΑΣ"), (2, 1, "one"))
    )
    return [
        ("keywords:existence", {"keywords": rng.sample(("apple", "rock", "I", "tra", "[a-z]1"), rng.randint(1, 3))}),
        ("keywords:frequency", {"keyword": word, "frequency": small, "relation": relation}),
        ("keywords:forbidden_words", {"forbidden_words": rng.sample(("apple", "rock", "hotel", "i", "maybe"), 2)}),
        (
            "keywords:letter_frequency",
            {"letter": rng.choice("aeRz"), "let_frequency": 5 * small, "let_relation": relation},
        ),
        ("language:response_language", {"language": rng.choice(("en", "en", "de", "fr"))}),
        ("length_constraints:number_sentences", {"num_sentences": small, "relation": relation}),
        ("length_constraints:number_paragraphs", {"num_paragraphs": small}),
        ("length_constraints:number_words", {"num_words": 10 * small, "relation": relation}),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": paragraphs, "nth_paragraph": nth, "first_word": first},
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": small}),
        ("detectable_content:postscript", {"postscript_marker": rng.choice(("P.S.", "P.P.S", "maybe", " done "))}),
        ("detectable_format:number_bullet_lists", {"num_bullets": small}),
        ("detectable_format:constrained_response", {}),
        ("detectable_format:number_highlighted_sections", {"num_highlights": small}),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": rng.choice(("Section", "SECTION", " Day")), "num_sections": 1},
        ),
        ("detectable_format:json_format", {}),
        ("detectable_format:title", {}),
        ("combination:two_responses", {}),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem. "}),
        ("startend:end_checker", {"end_phrase": rng.choice(("Any other questions?", " The End", "."))}),
        ("startend:quotation", {}),
        ("change_case:capital_word_frequency", {"capital_frequency": small, "capital_relation": relation}),
        ("change_case:english_capital", {}),
        ("change_case:english_lowercase", {}),
        ("punctuation:no_comma", {}),
    ]


def answer(rng: random.Random) -> str:
    """Answer of a few words or pieces between marks, in one case, in quotes, after a prompt; or one of PLAIN."""
    text = "".join(
        rng.choice((*WORDS, *PIECES)) + rng.choice(MARKS) for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8, 20)))
    )
    change = rng.randrange(12)
    if rng.random() < 0.3:
        return rng.choice(PLAIN)
    if change < 3:
        return (text.upper(), text.lower(), f'"{text}"')[change]
    if change < 6:
        return ("Write a poem.\n" + text, f"Sure:\n\n{text}\nthe end", f"{text}******{rng.choice(PIECES)}")[change - 3]
    return text


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Any:
    """The harness's utils of IFEval, with sentence parameters that are made up and a fixed seed of langdetect."""
    import langdetect
    import nltk.data

    nltk.data.path.insert(0, str(write_punkt(tmp_path_factory.mktemp("nltk"))))
    langdetect.DetectorFactory.seed = 0
    from lm_eval.tasks.ifeval import utils

    instructions._sentence_tokenizer.cache_clear()
    yield utils
    nltk.data.path.pop(0)


def check(theirs: Any, seed: int, rounds: int) -> dict[str, set[bool]]:
    rng = random.Random(seed)
    seen: dict[str, set[bool]] = {}
    for _ in range(rounds):
        texts = [answer(rng) for _ in range(4)]
        for name, arguments in kinds(rng):
            instruction = read_instruction(name, arguments)
            for text in texts:
                it = theirs.InputExample(0, [name], "", [arguments])
                [strict] = theirs.test_instruction_following_strict(it, text).follow_instruction_list
                [loose] = theirs.test_instruction_following_loose(it, text).follow_instruction_list
                assert instruction.is_followed(text) == strict, (name, arguments, text)
                assert instruction.is_followed_loosely(text) == loose, (name, arguments, text)
                seen.setdefault(name, set()).add(strict)
    return seen


def test_every_check_decides_as_the_harness_s(theirs):
    seen = check(theirs, 1, 20)
    assert len(seen) == 25
    assert [name for name, both in seen.items() if len(both) < 2] == []


@pytest.mark.slow
def test_every_check_decides_as_the_harness_s_on_many_more(theirs):
    check(theirs, 2, 300)


def write_prompts(file: Path, rng: random.Random, count: int) -> Path:
    """Write prompts with up to three instructions each."""
    every = sorted({key for _, arguments in kinds(rng) for key in arguments})
    lines = []
    for key in range(count):
        some = rng.sample(kinds(rng), rng.randint(1, 3))
        # As on the hub: every argument is a column, null where an instruction has none.
        arguments = [{name: given.get(name) for name in every} for _, given in some]
        names = [name for name, _ in some]
        lines.append({"key": key, "prompt": f" Write {key}. ", "instruction_id_list": names, "kwargs": arguments})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_a_whole_task(theirs, tmp_path, monkeypatch):
    from tests.numerics.test_eval_lm_eval import harness
    from tests.support import harness as oracle

    rng = random.Random(3)
    texts = [answer(rng) for _ in range(40)]

    def generate(context: Any) -> str:
        return texts[int(icl.score(context, [0])[0] * -1e6) % len(texts)]

    monkeypatch.setattr(icl, "generate", generate)
    monkeypatch.setattr(oracle, "generate", generate)
    file = write_prompts(tmp_path / "train.jsonl", rng, 40)
    task = load_task("ifeval", "lm-eval")
    task = NativeTask(task.config, "lm-eval", Source(path=file.name), tmp_path)
    tokenizer = icl.byte_level()
    documents = task.documents()
    requests = task.requests(documents, tokenizer)
    metrics = task.metrics(documents, requests, icl.ask(requests))
    lm = harness(tokenizer, tmp_path / "tokenizer")
    results = oracle.evaluate(lm, oracle.shipped("ifeval/ifeval.yaml", {"train": file}, tmp_path / "cache"), 0, None)
    assert [(one.context, one.stops, one.max_new_tokens) for one in requests] == lm.generations  # type: ignore[union-attr]
    for name, value in metrics.values.items():
        assert value.value == pytest.approx(results[f"{name},none"]), name
        assert 0 < value.value < 1
    assert metrics.headline == "prompt_level_strict_acc"


@pytest.mark.slow
def test_the_command(theirs, tmp_path):
    """The shipped task through `llmtrain eval`: answers of 1,280 tokens, judged as the harness judges what was kept of them."""
    place, out = Place(tmp_path / "place"), tmp_path / "out"
    file = write_prompts(tmp_path / "ifeval.jsonl", random.Random(5), 12)
    arguments = ["--tasks", "ifeval", "--data-dir", str(tmp_path), f"model={place.model}", "max_length=1400"]
    assert main(["eval", *arguments, "--out", str(out)]) == 0
    [found] = json.loads((out / "results.json").read_text())["results"]
    assert found["metric"] == "prompt_level_strict_acc" and found["documents"] == 12
    judged: dict[str, list[float]] = {}
    kept = read_lines(out / found["documents_file"])
    for line, answered in zip(file.read_text().splitlines(), kept, strict=True):
        record = json.loads(line)
        record["kwargs"] = [{key: value for key, value in one.items() if value is not None} for one in record["kwargs"]]
        for name, value in theirs.process_results(record, [answered["text"]]).items():
            judged.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    assert {name: one["value"] for name, one in found["metrics"].items()} == pytest.approx(
        {name: sum(values) / len(values) for name, values in judged.items()}
    )
    assert len({line["text"] for line in kept}) > 6
