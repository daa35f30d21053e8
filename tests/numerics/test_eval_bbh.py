"""BIG-Bench Hard against the files of lm-evaluation-harness: every filter on many answers, and whole tasks."""

import importlib.util
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.report.filters import apply_filters
from llmtrain.eval.report.process_results import lm_eval_exact_match
from llmtrain.eval.tasks.documents import Question
from llmtrain.eval.tasks.filters import ExtractNumber
from llmtrain.eval.tasks.sections import LmEvalPrompting, Source
from tests.numerics.test_eval_lm_eval import assert_same, harness, ours
from tests.support import icl

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

FOLDERS = {"bbh": "zeroshot", "bbh_cot": "cot_zeroshot"}
SUBTASKS = (load_task("bbh", "lm-eval").source.config) or []
CHOICES = 'Options:\n(A) The Mark\n(B) the mark, and more\n(C) 12/05/2001\n(D) It\'s "Ann"!'
PARTS = (
    *("(A)", "(B).", "(D", "the mark", "The mark and more", "12052001", "its ann", "Answer: C", ": \nD", "(F)"),
    *("True", "False", "not (True)", "Yes", "no", "yes.", "valid", "invalid", "deductively invalid", "[invalid]"),
    *("plausible", "not plausible", "No, it is NOT PLAUSIBLE", "tells the truth", "does not tell the truth"),
    *("is telling the truth", "is not telling the truth", "-12", "1,200", "7-8", "x = 3.", "\\", '"', "\n", "#"),
    *("] ) }", "( [ < >", "} ]", "apple", "Pear", "bee", "bee apple", "pineapple pear", "", " ", ".", "Q", "</s>"),
    *("The answer is", "the answer is", "The answer:", "The final answer:", "So", "and", "|"),
)
NUMBERS = (
    *("six", "five", "eight", "eighteen", "eighty", "eighty two", "twenty", "twenty one", "twenty-one", "fourteen"),
    *("nineteen", "one hundred", "one hundred and five", "two hundred thirty four", "three thousand", "a hundred"),
    *("hundred", "two million five", "three, four", "four and five", "one two three four five", "ten & two", "twelve"),
    *("zero", "forty six", "ninety\tnine", "one\ntwo", "six hundred", "trillion", "two billion one million ten"),
)


def answers(rng: random.Random, count: int) -> list[str]:
    return [*PARTS, *(rng.choice((" ", "", "\n")).join(rng.choices(PARTS, k=rng.randint(2, 6))) for _ in range(count))]


def record(name: str, rng: random.Random) -> dict[str, Any]:
    """Made-up record of a subtask, with its kind of target."""
    text = icl.some_sentence(rng, 5)
    match name:
        case "boolean_expressions":
            return {"input": f"not {text} is", "target": rng.choice(("True", "False"))}
        case "causal_judgement" | "navigate" | "web_of_lies":
            return {"input": f"{text}?", "target": rng.choice(("Yes", "No"))}
        case "formal_fallacies":
            return {"input": text, "target": rng.choice(("valid", "invalid"))}
        case "sports_understanding":
            return {"input": text, "target": rng.choice(("yes", "no"))}
        case "dyck_languages":
            return {"input": "Input: ( [", "target": rng.choice(("] )", "}", "] ) }"))}
        case "multistep_arithmetic_two" | "object_counting":
            return {"input": text, "target": rng.choice(("-12", "3", "1200", "8"))}
        case "word_sorting":
            return {"input": f"{text} List: pear bee apple", "target": rng.choice(("apple bee pear", "bee apple"))}
    return {"input": f"{text}\n{CHOICES}", "target": rng.choice(("(A)", "(B)", "(C)", "(D)"))}


@pytest.mark.parametrize("subtask", SUBTASKS)
@pytest.mark.parametrize("name", FOLDERS)
def test_filters_find_what_the_harness_finds(name: str, subtask: str):
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters import get_filter
    from lm_eval.tasks._yaml_loader import load_yaml

    from tests.support.harness import TASKS

    config = load_yaml(TASKS / "bbh" / FOLDERS[name] / f"{subtask}.yaml")
    settings = {
        key: value for key, value in config["metric_list"][0].items() if key in ("ignore_case", "regexes_to_ignore")
    }
    rng = random.Random(subtask)
    task = load_task(name, "lm-eval")
    assert isinstance(task.settings, LmEvalPrompting)
    doc = record(subtask, rng)
    choices = re.findall(r"\([A-Z]\)([^\n^(]*)", doc["input"])
    if subtask == "word_sorting":
        choices = ["pear", "bee", "apple"]
    question = Question("", doc["target"], (), choices=tuple(choices))
    texts = [one for one in answers(rng, 100) if not re.search("one|two|three|four|five|ten|hundred", one)]
    found = [lm_eval_exact_match(text, question, task.settings, subtask) for text in texts]
    for chain in config["filter_list"]:
        theirs: Any = [[_until(text, config["generation_kwargs"]["until"])] for text in texts]
        for step in chain["filter"]:
            made = partial(get_filter(step["function"]), **{k: v for k, v in step.items() if k != "function"})()
            theirs = list(made.apply(theirs, [doc] * len(theirs)))
        key = chain["name"].replace("-", "_")
        for text, given, one in zip(texts, theirs, found, strict=True):
            score = exact_match_hf_evaluate(predictions=[given], references=[doc["target"]], **settings)["exact_match"]
            assert one[key] == bool(score), (text, given, doc)


def _until(text: str, stops: list[str]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


@pytest.mark.parametrize("match", [0, -1])
def test_numbers_in_words_are_the_harness_s(match: int):
    from lm_eval.tasks.bbh.zeroshot.utils import NumberParseRegexFilter

    rng = random.Random(7)
    theirs = NumberParseRegexFilter(regex_pattern="([-0-9]+)", group_select=match)
    compared = 0
    for text in (
        *NUMBERS,
        *(f"{rng.choice(NUMBERS)}{rng.choice((' ', '. ', ' or '))}{rng.choice(NUMBERS)}" for _ in range(300)),
    ):
        try:
            [[expected]] = theirs.apply([[text]], [{}])
        except (ValueError, IndexError):  # of word2number, which ends the harness's run
            expected = "[invalid]"
        assert apply_filters(text, [ExtractNumber(type="number", match=match)]) == expected, text
        compared += expected != "[invalid]"
    assert compared > 100


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize(
    ("subtask", "shots"),
    [
        *(("snarks", 0), ("tracking_shuffled_objects_five_objects", 2), ("word_sorting", 0)),
        *(pytest.param(one, shots, marks=pytest.mark.slow) for one in SUBTASKS for shots in (0, 3)),
    ],
)
def test_whole_tasks(name: str, subtask: str, shots: int, tmp_path: Path, monkeypatch):
    from tests.support import harness as oracle

    rng = random.Random(subtask)
    texts = answers(rng, 50)

    def generate(context: Any) -> str:
        return texts[int(icl.score(context, [0])[0] * -1e6) % len(texts)]

    monkeypatch.setattr(icl, "generate", generate)
    monkeypatch.setattr(oracle, "generate", generate)
    records = [record(subtask, rng) for _ in range(12)]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    task = load_task(name, "lm-eval")
    fields = {"subtask": f"{{{{'{subtask}'}}}}"}
    task = NativeTask(task.config, "lm-eval", Source(path=file.name, fields=fields), tmp_path)
    tokenizer = icl.byte_level()
    requests, metrics = ours(task, tokenizer, shots)
    theirs = harness(tokenizer, tmp_path / "tokenizer")
    config = oracle.shipped(
        f"bbh/{FOLDERS[name]}/{subtask}.yaml", {"test": file}, tmp_path / "cache", fewshot_split="test"
    )
    results = oracle.evaluate(theirs, config, shots, None)
    assert_same(theirs, results, requests, metrics)
