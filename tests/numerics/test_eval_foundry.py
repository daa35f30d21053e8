"""The LLM Foundry convention against tests/support/foundry_oracle.py: token ids and right answers."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.native_task import NativeTask, load_task
from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood, LoglikelihoodRequest, Request
from llmtrain.eval.tasks.sections import FoundryPrompting
from tests.support import foundry_oracle as oracle
from tests.support.icl import ask, icl_file, some_sentence

FILES = {
    "winograd": "winograd_wsc",
    "lambada": "lambada_openai",
    "jeopardy": "jeopardy_all",
    "triviaqa": "triviaqa_sm_sub",
}
TASKS = (
    *("arc_challenge", "arc_easy", "boolq", "copa", "gsm8k", "hellaswag", "jeopardy"),
    *("lambada", "mmlu", "openbook_qa", "piqa", "triviaqa", "winograd", "winogrande"),
)
ANSWERED = {"continuation_delimiter": "\nAnswer: "}
STYLES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("arc_challenge", "arc_easy", "boolq", "jeopardy", "mmlu", "piqa"), ANSWERED),
    "gsm8k": {
        "prelimiter": "Q: ",
        "continuation_delimiter": "\nA: Let's think step by step. ",
        "cot_delimiter": " #### ",
    },
}
"""Settings of LLM Foundry's own task files (scripts/eval/yamls/tasks_v0.2.yaml)."""
CATEGORIES = ("jeopardy", "mmlu")


def hugging_face(tokenizer: TextTokenizer, folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def records_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def task_of(name: str, file: Path, **changes: Any) -> NativeTask:
    """A shipped task on a file, with other settings of its foundry section."""
    task = load_task(name, "foundry", file.parent)
    config = task.config.model_copy(update={"pmi": None, "foundry": task.config.foundry.model_copy(update=changes)})
    return NativeTask(config, "foundry", task.source.model_copy(update={"path": file.name}), task.base)


def grouped(requests: list[Request]) -> list[list[Any]]:
    """Requests per document, in the form of the oracle."""
    documents: dict[int, list[Any]] = {}
    for one in requests:
        rest = list(one.continuation) if isinstance(one, LoglikelihoodRequest) else one.max_new_tokens
        documents.setdefault(one.document, []).append((list(one.context), rest))
    return list(documents.values())


def check(
    task: NativeTask, records: list[dict[str, Any]], tokenizer: TextTokenizer, settings: dict, shots: int, folder: Path
):
    documents = task.documents()
    requests = task.requests(documents, tokenizer, shots)
    categories = task.config.category is not None
    expected = oracle.requests(
        task.type, records, hugging_face(tokenizer, folder), oracle.FoundrySettings(**settings), shots, categories
    )
    assert len(expected) == len(records) > 1
    assert grouped(requests) == expected
    check_verdicts(task, documents, requests, records, oracle.FoundrySettings(**settings))


def check_verdicts(
    task: NativeTask, documents: Any, requests: list, records: list[dict[str, Any]], settings: oracle.FoundrySettings
):
    results = ask(requests)
    metrics = task.metrics(documents, requests, results)
    answers: dict[int, list[Any]] = {}
    for request, result in zip(requests, results, strict=True):
        answers.setdefault(request.document, []).append(result)
    hits = {index: verdict(records[index], given, settings) for index, given in answers.items()}
    parts = [list(hits.values())]
    if task.config.category is not None:
        names = sorted({record["category"] for record in records})
        parts = [[hit for index, hit in hits.items() if records[index]["category"] == name] for name in names]
    assert metrics.score.value == pytest.approx(statistics.mean(statistics.mean(part) for part in parts), rel=1e-12)
    assert metrics.documents == len(records)


def verdict(record: dict[str, Any], given: list[Any], settings: oracle.FoundrySettings) -> float:
    if isinstance(given[0], GeneratedText):
        return float(oracle.answered(record, given[0].text, settings))
    assert isinstance(given[0], Loglikelihood)
    if len(given) == 1:
        return float(given[0].greedy)
    return float(oracle.picks_gold(record, [-one.log_likelihood / one.tokens for one in given]))


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("name", TASKS)
def test_shared_files(name: str, shots: int, tokenizer, tmp_path):
    """The first 300 documents, of which the examples are drawn too."""
    source = icl_file(FILES.get(name, name))
    file = tmp_path / "records.jsonl"
    lines = source.read_text(encoding="utf-8").rstrip("\n").split("\n")[:300]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if len(lines) < 4 or (name in CATEGORIES and shots > 2 and len(lines) < 10):
        shots = min(shots, 2)
    if name == "mmlu" and shots:
        lines = [json.dumps(json.loads(line) | {"category": "one"}) for line in lines]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    check(task_of(name, file), records_of(file), tokenizer, STYLES.get(name, {}), shots, tmp_path)


def made_up(kind: str, rng: random.Random) -> dict[str, Any]:
    """A record in LLM Foundry's line format, with white space where it matters."""

    def text(words: int) -> str:
        return rng.choice(("", " ", "\n")) + some_sentence(rng, words) + rng.choice(("", " ", "\n"))

    match kind:
        case "multiple_choice":
            record = {"query": text(6), "choices": [text(3) for _ in range(3)], "gold": rng.randrange(3)}
        case "schema":
            record = {"context_options": [text(5), text(6)], "continuation": text(4), "gold": rng.randrange(2)}
        case "language_modeling":
            record = {"context": text(8), "continuation": text(2)}
        case _:
            record = {"context": text(8), "answer": text(1), "aliases": [text(2), "The Mark"]}
    return record | {"category": rng.choice("xyz")}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prelimiter": "Q: ", "continuation_delimiter": "\nA: ", "example_delimiter": "\n\n", "preamble": "Answer these."},
    {"prelimiter": "> ", "continuation_delimiter": "", "example_delimiter": "###"},
    {"normalize": False, "stops": ["\n", "Q:"], "cot_delimiter": "#### ", "continuation_delimiter": " = "},
]
THEIRS = {"preamble": "prompt_string", "normalize": "do_normalization", "stops": "early_stopping_criteria"}


@pytest.mark.parametrize("shots", [0, 1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize("kind", oracle.TYPES)
def test_settings_and_tokenizers(kind: str, settings: dict[str, Any], shots: int, any_tokenizer, tmp_path):
    rng = random.Random(7)
    records = [made_up(kind, rng) for _ in range(40)]
    categories = "preamble" in settings  # one of the settings with categories too
    if kind != "generation":
        settings = {key: value for key, value in settings.items() if key not in ("normalize", "stops", "cot_delimiter")}
    if "cot_delimiter" in settings:
        records = [record | {"chain_of_thought": " so " + some_sentence(rng, 4)} for record in records]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    if kind == "generation" and "cot_delimiter" in settings:
        ours = settings | {"chain_of_thought": "{{chain_of_thought}}"}
    else:
        ours = settings
    written = {"name": "it", "type": kind, "source": {"path": "records.jsonl"}, "foundry": ours}
    if categories:
        written["category"] = "{{category}}"
    (tmp_path / "it.yaml").write_text(json.dumps(written), encoding="utf-8")
    settings = {THEIRS.get(key, key): value for key, value in settings.items()}
    check(load_task(tmp_path / "it.yaml", "foundry"), records, any_tokenizer, settings, shots, tmp_path / "tokenizer")


def test_the_first_documents_do_not_depend_on_how_many_follow(tokenizer, tmp_path):
    rng = random.Random(1)
    records = [made_up("multiple_choice", rng) for _ in range(30)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    written = {"name": "it", "type": "multiple_choice", "source": {"path": "records.jsonl"}}
    (tmp_path / "it.yaml").write_text(json.dumps(written), encoding="utf-8")
    for convention in ("foundry", "lm-eval"):
        task = load_task(tmp_path / "it.yaml", convention)
        few, many = (task.requests(task.documents(limit), tokenizer, 4) for limit in (5, None))
        assert few == many[: len(few)]
        assert len(few) == 15


def test_sections_hold_the_oracles_defaults():
    ours, theirs = FoundryPrompting(), oracle.FoundrySettings()
    for name in ("example_delimiter", "continuation_delimiter", "prelimiter", "cot_delimiter"):
        assert getattr(ours, name) == getattr(theirs, name)
