"""Sums as prompts with answers, a reward that an untrained model gets too, and a tiny run of a policy."""

import json
import random
from pathlib import Path
from typing import Any

from llmtrain.data.prepare import prepare
from llmtrain.schema.config import Config
from llmtrain.schema.data import PrepareConfig
from tests.support.tiny import tiny_settings

PROMPTS, GROUP = 4, 4


def low_bytes(answer: str, record: dict[str, Any]) -> float:
    """Share of characters below the letters, as a reward that varies."""
    return sum(one < "a" for one in answer) / max(len(answer), 1)


def low_bytes_at_times(answer: str, record: dict[str, Any]) -> float:
    """The same, with failures of every kind at some prompts."""
    match record["prompt"][0]:
        case "0":
            raise KeyError("none")
        case "1":
            return float("nan")
    return low_bytes(answer, record)


def sums_data(folder: Path, records: list[dict[str, Any]] | None = None, **settings: Any) -> Path:
    """A prepared folder of prompts such as `3+1=`, each in a sample of 32 tokens."""
    rng = random.Random(1)
    made = ((rng.randrange(5), rng.randrange(5)) for _ in range(200))
    records = records or [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in made]
    source = folder / "sums.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in records))
    values = {"sources": [str(source)], "out": str(folder / "sums"), "vocab_size": 257, "seq_len": 32, "workers": 1}
    values |= {"packing": "padded", "validation_fraction": 0.1} | settings
    prepare(PrepareConfig.model_validate(values), progress=False)
    return folder / "sums"


def policy_config(data: Path, run_dir: Path, changes: dict[str, Any] | None = None) -> Config:
    """changes: of the YAML, by dotted path."""
    reward = {"name": "function", "function": "tests.support.policy:low_bytes", "allow_code": True, "seconds": 30.0}
    settings = {
        "objective": {"type": "policy", "rewards": [reward], "group_size": GROUP, "max_new_tokens": 6},
        "data.mask_documents": True,
        "train.global_batch_size": PROMPTS * GROUP,
        "train.microbatch_size": 4,
        "train.duration": "4 steps",
        "train.deterministic": True,
        "eval.interval": "4 steps",
    }
    return Config.model_validate_json(json.dumps(tiny_settings(data, run_dir, settings | (changes or {}))))
