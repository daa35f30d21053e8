"""Folder for evaluations: a small checkpoint, and tasks of every type with their data."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from llmtrain.data.tokenize.tokenizer import train_bpe
from llmtrain.eval.run_config import EvalRun, load_eval_run
from llmtrain.models.config import ModelConfig
from tests.support import checkpoints
from tests.support.tiny import BLOCKS

_SENTENCE = (
    "the quick brown fox jumps over a lazy dog while seven wizards make toxic brew for evil queens and nine judges"
)
WORDS = _SENTENCE.split()
VOCAB = 320
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "max_seq_len": 256,
    "blocks": BLOCKS,
    "layers": "m (s+m)*2",
}
TASKS = ("choice", "schema", "cloze", "text", "answer")


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))


def records(kind: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(kind)
    made: list[dict[str, Any]] = []
    for _ in range(count):
        match kind:
            case "choice":
                choices = [words(rng, 1, 6) for _ in range(4)]
                made.append({"query": words(rng, 4, 30), "choices": choices, "gold": rng.randrange(4)})
            case "schema":
                start = words(rng, 3, 9)
                options = [f"{start} {words(rng, 1, 3)}" for _ in range(2)]
                made.append({"context_options": options, "continuation": words(rng, 2, 5), "gold": rng.randrange(2)})
            case "cloze":
                made.append({"context": words(rng, 5, 40), "continuation": words(rng, 1, 2)})
            case "text":
                made.append({"text": words(rng, 100, 400)})
            case "answer":
                made.append({"context": words(rng, 5, 20), "answer": words(rng, 1, 2), "aliases": []})
    return made


class Place:
    """Folder with a checkpoint, a YAML and a JSONL file per task, and an eval.yaml that runs them all."""

    def __init__(self, folder: Path, documents: int = 12):
        self.folder = folder
        self.model = folder / "tiny"
        tokenizer = train_bpe([" ".join(WORDS) + " Answer: \n"] * 30, VOCAB)
        generator = torch.Generator().manual_seed(0)
        step = self.model / "checkpoints" / "step-00000001"
        step.parent.mkdir(parents=True)
        config = ModelConfig.model_validate_json(json.dumps(MODEL))
        checkpoints.save(step, config, lambda shape: 0.3 * torch.randn(shape, generator=generator), tokenizer)
        self.tasks = [str(self._task(name, documents)) for name in TASKS]
        self.write({})

    def _task(self, name: str, documents: int) -> Path:
        kinds = {
            "choice": {"type": "multiple_choice", "pmi": "Answer:", "shots": [0, 2]},
            "schema": {"type": "schema"},
            "cloze": {"type": "language_modeling"},
            "text": {"type": "perplexity"},
            "answer": {"type": "generation", "lm_eval": {"max_new_tokens": 12, "stops": ["\n"]}},
        }
        data, file = self.folder / f"{name}.jsonl", self.folder / f"{name}.yaml"
        count = 2 if name == "text" else documents
        data.write_text("".join(json.dumps(record) + "\n" for record in records(name, count)))
        file.write_text(json.dumps({"name": name, "source": {"path": data.name}} | kinds[name]))
        return file

    @property
    def settings(self) -> dict[str, Any]:
        return {"name": "try", "tasks": self.tasks, "out": str(self.folder / "results"), "models": [str(self.model)]}

    def write(self, changes: dict[str, Any]) -> Path:
        """Write eval.yaml with these changes."""
        file = self.folder / "eval.yaml"
        file.write_text(json.dumps(self.settings | changes))
        return file

    def run(self, **changes: Any) -> EvalRun:
        try:
            return load_eval_run(self.write(changes))
        finally:
            self.write({})
