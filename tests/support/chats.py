"""Conversations for tests, with answers of very different lengths, prepared."""

import json
import random
from pathlib import Path
from typing import Any

from llmtrain.data.prepare import prepare
from llmtrain.schema.data import PrepareConfig

COLOURS = "red green blue yellow black white".split()  # noqa: SIM905


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Messages of conversations of one or two questions."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        turns = []
        for _ in range(rng.choice((1, 1, 2))):
            said = " ".join(rng.choice(COLOURS) for _ in range(rng.choice((1, 2, 9))))
            turns += [{"role": "user", "content": f"Repeat {said}"}, {"role": "assistant", "content": said}]
        found.append(turns)
    return found


def write_chats(file: Path, chats: list[list[dict[str, str]]]) -> str:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(file)


def prepare_chats(folder: Path, packing: str, count: int = 600, seq_len: int = 64, **chat: Any) -> Path:
    """The folder of shards of conversations that no sample is too short for."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"vocab_size": 300, "seq_len": seq_len, "validation_fraction": 0.1, "workers": 1, "packing": packing}
    values |= {"sources": [write_chats(folder / "chats.jsonl", conversations(count))], "out": str(folder / "shards")}
    prepare(PrepareConfig.model_validate(values | {"chat": {"template": "chatml"} | chat}), progress=False)
    return folder / "shards"
