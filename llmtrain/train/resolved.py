"""RUN/resolved.json: what a run made of the settings that were left to it (`auto`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmtrain.schema.config import Config

FILE = "resolved.json"
OLD_FILE = "settled.json"
"""The name of FILE in runs before 2026-11-27."""
_KEYS = ("microbatch_size", "sharding", "activation_checkpointing")


def write_resolved(folder: Path, config: Config) -> None:
    """config: without `auto`. Written at each start, by one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    train = config.train.model_dump(mode="json")
    (folder / FILE).write_text(json.dumps({key: train[key] for key in _KEYS}, indent=1), encoding="utf-8")


def read_resolved(folder: Path) -> dict[str, Any]:
    """Settings that a run resolved, from the file in its folder, under its name or its old one."""
    path = folder / FILE
    return json.loads((path if path.exists() else folder / OLD_FILE).read_text(encoding="utf-8"))
