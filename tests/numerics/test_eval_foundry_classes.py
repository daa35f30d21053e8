"""Generation tasks of LLM Foundry beside its own data set and metric: prompts, lengths of answers and verdicts.

tests/data/foundry_generation.json holds what its classes give. With LLM_FOUNDRY=CHECKOUT (of the commit that
tests/support/foundry_classes.py names) they are run again and compared with it; with LLM_FOUNDRY_WRITE=1 as well, it is written.
"""

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from llmtrain.data.tokenize.tokenizer import TextTokenizer, make_tokenizer, train_bpe
from llmtrain.eval.native_task import load_task
from llmtrain.eval.prompts.requests import GeneratedText, GenerateUntilRequest
from tests.support.icl import bos_processor, some_sentence

EXPECTED = Path(__file__).parents[1] / "data" / "foundry_generation.json"
STEP_BY_STEP = {"cot_delimiter": " #### ", "continuation_delimiter": "\nA: Let's think step by step. "}
TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "svamp": (
        5,
        {"continuation_delimiter": "\nUsing the formula below:\n", "cot_delimiter": " #### ", "prelimiter": "Q: "},
    ),
    "svamp_v0.3": (
        5,
        {
            "cot_delimiter": "The answer is ",
            "continuation_delimiter": "\n\nA:",
            "prelimiter": "Question: ",
            "do_normalization": False,
            "early_stopping_criteria": ["\n\n", "Question:"],
        },
    ),
    "triviaqa": (3, {}),
    "gsm8k": (5, {"prelimiter": "Q: ", **STEP_BY_STEP}),
    "agi_eval_sat_math": (3, STEP_BY_STEP),
}
"""(shots, settings) of LLM Foundry's tasks_v0.2.yaml and tasks_v0.3.yaml."""
OURS = {"do_normalization": "normalize", "early_stopping_criteria": "stops"}
CASES = [(task, kind, shots) for task, (most, _) in TASKS.items() for kind in ("plain", "bos") for shots in (0, most)]


def tokenizer(kind: str) -> TextTokenizer:
    """One token per byte, so that no version of a library trains another one. kind: bos begins every text with <s>."""
    made = train_bpe([], 257)
    if kind == "plain":
        return made
    made.backend.add_special_tokens(["<s>"])
    made.backend.post_processor = bos_processor(made.backend)
    return make_tokenizer(made.backend, made.eod_token, made.config | {"bos_token": "<s>"})


def records(task: str) -> list[dict[str, Any]]:
    """Made-up records with the columns of LLM Foundry's file, and white space where it matters."""
    rng = random.Random(task)
    made = []
    for _ in range(24):
        ends = rng.choice(("", " ", "\n"))
        if task == "triviaqa":
            names = [some_sentence(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
            context = f"Question: {some_sentence(rng, 8)}?\nAnswer:{ends}"
            made.append({"context": context, "answer": names[0], "aliases": names[1:]})
        else:
            reasoning = "\n".join(some_sentence(rng, rng.randint(3, 9)) for _ in range(rng.randint(1, 3)))
            context, answer = f"{some_sentence(rng, 9)}?{ends}", f"{rng.randrange(2000):,}"
            made.append({"context": context, "chain_of_thought": f"{ends}{reasoning}", "answer": answer})
    return made


def answers(task: str) -> list[str]:
    """Generated texts, right and wrong in the ways that matter."""
    rng, delimiter = random.Random(1), TASKS[task][1].get("cot_delimiter", "")
    texts = []
    for record in records(task):
        right = rng.choice([record["answer"], *record.get("aliases", [])])
        reasoned = record.get("chain_of_thought", "") + delimiter + right
        texts.append(
            rng.choice(
                [
                    right,
                    f" {right} and more",
                    reasoned,
                    f"the {right.upper()}!",
                    "no",
                    f"{reasoned}\n\nQuestion: {right}",
                    "",
                ]
            )
        )
    return texts


def summary(prompts: list[list[int]], most_new_tokens: int, right: list[int]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    tokens = [min(map(len, prompts)), max(map(len, prompts))]
    return {"prompts": digest, "tokens": tokens, "most_new_tokens": most_new_tokens, "right": "".join(map(str, right))}


def ours(task: str, kind: str, shots: int, folder: Path) -> dict[str, Any]:
    settings = {OURS.get(name, name): value for name, value in TASKS[task][1].items()}
    (folder / "x.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records(task)), encoding="utf-8")
    written = {"name": task, "type": "generation", "source": {"path": "x.jsonl"}, "foundry": settings}
    (folder / "it.yaml").write_text(json.dumps(written), encoding="utf-8")
    made = load_task(folder / "it.yaml", "foundry")
    documents = made.documents()
    requests = made.requests(documents, tokenizer(kind), shots)
    limits = {one.max_new_tokens for one in requests if isinstance(one, GenerateUntilRequest)}
    metrics = made.metrics(documents, requests, [GeneratedText(text) for text in answers(task)])
    right = [int(one.values["exact_match"][0]) for one in metrics.per_document]
    return summary([list(one.context) for one in requests], limits.pop(), right)


@pytest.mark.parametrize(("task", "kind", "shots"), CASES)
def test_prompts_lengths_and_verdicts(task: str, kind: str, shots: int, tmp_path):
    """Without a line for it in the YAML, the file's chain_of_thought is in the examples and in the length of answers."""
    expected = json.loads(EXPECTED.read_text())[f"{task}, {kind}, {shots}-shot"]
    assert ours(task, kind, shots, tmp_path) == expected
    assert 3 < expected["right"].count("1") < 21


@pytest.mark.skipif("LLM_FOUNDRY" not in os.environ, reason="needs LLM_FOUNDRY, a checkout of LLM Foundry")
def test_the_file_holds_what_llm_foundrys_classes_give(tmp_path):
    from transformers import AutoTokenizer

    from tests.support.foundry_classes import FoundryClasses

    classes = FoundryClasses(Path(os.environ["LLM_FOUNDRY"]))
    found = {}
    for task, kind, shots in CASES:
        file = tmp_path / f"{task}-{kind}-{shots}.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in records(task)), encoding="utf-8")
        tokenizer(kind).save(tmp_path / kind)
        theirs = classes.generation(file, AutoTokenizer.from_pretrained(tmp_path / kind), shots, **TASKS[task][1])
        length = theirs.base_batch["generation_kwargs"]["max_new_tokens"]
        verdicts = classes.right(theirs, answers(task))
        found[f"{task}, {kind}, {shots}-shot"] = summary(classes.prompts(theirs), length, verdicts)
    if "LLM_FOUNDRY_WRITE" in os.environ:
        EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(EXPECTED.read_text())
