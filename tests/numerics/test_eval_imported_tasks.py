"""`llmtrain eval import-task`: what it prints, beside the harness's own class on the same file: token ids and scores."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval.lm_eval_tasks.convert import as_yaml, own_settings
from llmtrain.eval.lm_eval_tasks.yaml_file import read_task_file
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.requests import GenerateUntilRequest, LoglikelihoodRequest
from tests.support.icl import ask, byte_level, some_sentence

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm_eval, of the development dependencies"
)

Maker = Callable[[random.Random], dict[str, Any]]


def text(rng: random.Random, words: int = 6) -> str:
    return some_sentence(rng, words)


def columns(*names: str, **others: Callable[[random.Random], Any]) -> Maker:
    """Records with a text in each column, and what `others` make."""
    return lambda rng: {name: text(rng) for name in names} | {name: make(rng) for name, make in others.items()}


def label(*choices: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(choices)


def several(count: int) -> Callable[[random.Random], list[str]]:
    return lambda rng: [text(rng, 3) for _ in range(count)]


ARC = columns(
    "question",
    choices=lambda rng: {"text": several(4)(rng), "label": ["A", "B", "C", "D"]},
    answerKey=label("A", "B", "C", "D"),
)
NUMBERS: dict[str, Callable[[random.Random], Any]] = {"start1": label(1, 2), "end1": label(4, 7)}

CASES: dict[str, tuple[Maker, dict[str, str]]] = {
    "arc/arc_easy.yaml": (ARC, {"acc": "acc_sum", "acc_norm": "acc_per_char"}),
    "sciq/sciq.yaml": (
        columns("support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"),
        {"acc": "acc_sum", "acc_norm": "acc_per_char"},
    ),
    "swag/swag.yaml": (
        columns("startphrase", "ending0", "ending1", "ending2", "ending3", label=label(0, 1, 2, 3)),
        {"acc": "acc_sum", "acc_norm": "acc_per_char"},
    ),
    "super_glue/wic/default.yaml": (
        columns("sentence1", "sentence2", label=label(0, 1), **NUMBERS),
        {"acc": "acc_sum"},
    ),
    "glue/rte/default.yaml": (columns("sentence1", "sentence2", label=label(0, 1)), {"acc": "acc_sum"}),
    "super_glue/boolq/default.yaml": (columns("passage", "question", label=label(0, 1)), {"acc": "acc_sum"}),
    "mmlu/default/mmlu_college_biology.yaml": (
        columns("question", choices=several(4), answer=label(0, 1, 2, 3)),
        {"acc": "acc_sum"},
    ),
    "blimp/adjunct_island.yaml": (columns("sentence_good", "sentence_bad"), {"acc": "acc_sum"}),
    "headqa/headqa_en.yaml": (
        columns("qtext", ra=label(1, 2, 3), answers=lambda rng: [{"aid": i, "atext": text(rng, 2)} for i in range(3)]),
        {"acc": "acc_sum", "acc_norm": "acc_per_char"},
    ),
    "qa4mre/qa4mre_2011.yaml": (
        columns(
            "document_str",
            "question_str",
            correct_answer_id=label("1", "2", "3"),
            answer_options=lambda rng: {"answer_str": several(3)(rng)},
        ),
        {"acc": "acc_sum", "acc_norm": "acc_per_char"},
    ),
    "belebele/belebele_eng_Latn.yaml": (
        columns(
            *("flores_passage", "question", "mc_answer1", "mc_answer2", "mc_answer3", "mc_answer4"),
            correct_answer_num=label("1", "2", "3", "4"),
        ),
        {"acc": "acc_sum", "acc_norm": "acc_per_char"},
    ),
    "asdiv/default.yaml": (columns("body", "question", answer=label("8 (apples)", "12 (km)")), {"acc": "acc"}),
    "lambada/lambada_openai.yaml": (columns("text"), {"perplexity": "perplexity", "acc": "acc"}),
    "lambada_cloze/lambada_openai_cloze.yaml": (columns("text"), {"perplexity": "perplexity", "acc": "acc"}),
    "gsm8k/gsm8k.yaml": (
        columns("question", answer=lambda rng: f"{text(rng)}\n#### {rng.randrange(9)}"),
        {"exact_match,strict-match": "strict-match", "exact_match,flexible-extract": "flexible-extract"},
    ),
    "unscramble/anagrams1.yaml": (
        columns("context", completion=label("the", "The Mark, and more")),
        {"exact_match": "exact_match"},
    ),
    "pile/pile_arxiv.yaml": (
        columns("text"),
        {"word_perplexity": "word_perplexity", "byte_perplexity": "byte_perplexity", "bits_per_byte": "bits_per_byte"},
    ),
}
"""Shipped files: records in the shape of their data set, and the names of their metrics here."""


IN_EVERY_RUN = {
    *("glue/rte/default.yaml", "headqa/headqa_en.yaml", "belebele/belebele_eng_Latn.yaml", "gsm8k/gsm8k.yaml"),
    *("lambada/lambada_openai.yaml", "mmlu/default/mmlu_college_biology.yaml"),
}


@pytest.mark.parametrize(
    ("path", "shots"),
    [
        pytest.param(path, shots, marks=[] if shots and path in IN_EVERY_RUN else pytest.mark.slow)
        for path in CASES
        for shots in (0, 2)
        if not shots or not path.startswith("pile")  # the perplexity of a text has no examples
    ],
)
def test_an_imported_task_has_the_files_token_ids_and_scores(path: str, shots: int, tmp_path: Path):
    from transformers import AutoTokenizer

    from tests.support import harness as oracle

    make, names = CASES[path]
    rng = random.Random(path)
    file = oracle.TASKS / path
    settings = read_task_file(file)
    splits: dict[str, Path] = {}
    named = {settings.get(f"{name}_split") for name in ("training", "validation", "test", "fewshot")}
    for split in [name for name in named if name is not None]:
        splits[split] = tmp_path / f"{split}.jsonl"
        splits[split].write_text("".join(json.dumps(make(rng)) + "\n" for _ in range(12)))
    files = {"data_files": {split: str(path) for split, path in splits.items()}}
    local = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}

    imported = tmp_path / "imported.yaml"
    imported.write_text(as_yaml(own_settings(settings | local, file), path))
    task = load_task(imported, "lm-eval")
    documents, tokenizer = task.documents(), byte_level()
    requests = task.requests(documents, tokenizer, shots, max_seq_len=2048)
    metrics = task.metrics(documents, requests, ask(requests))

    tokenizer.save(tmp_path / "tokenizer")
    theirs = oracle.Harness(AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    results = oracle.evaluate(theirs, oracle.shipped(path, splits, tmp_path / "cache"), shots, None)
    scores = [(one.context, one.continuation) for one in requests if isinstance(one, LoglikelihoodRequest)]
    texts = [(one.context, one.stops, one.max_new_tokens) for one in requests if isinstance(one, GenerateUntilRequest)]
    assert scores == theirs.asked and texts == theirs.generations and scores + texts
    for name, ours in names.items():
        metric, _, found = name.partition(",")
        assert metrics.values[ours].value == pytest.approx(results[f"{metric},{found or 'none'}"], rel=1e-9), name
    assert metrics.headline == next(iter(names.values())) or settings["output_type"] == "generate_until"
