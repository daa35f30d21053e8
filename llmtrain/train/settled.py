"""RUN/settled.json: what a run made of the settings that were left to it (`auto`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain.schema.config import Config

FILE = "settled.json"
_KEYS = ("microbatch_size", "sharding", "activation_checkpointing")


def write_settled(folder: Path, config: Config) -> None:
    """config: without `auto`. Written at each start, by one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    train = config.train.model_dump(mode="json")
    (folder / FILE).write_text(json.dumps({key: train[key] for key in _KEYS}, indent=1), encoding="utf-8")


def read_settled(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
