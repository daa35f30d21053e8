"""config.json of well-known models, as they lie on the Hugging Face hub (from memory; less what names files)."""

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data/published_configs.json"
"""By name of the model; `like`: of another one that has the other keys."""


@functools.cache
def _published() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, keys in json.loads(_FILE.read_text(encoding="utf-8")).items():
        found[name] = found.get(keys.pop("like", ""), {}) | {key: keys[key] for key in keys if key != "about"}
    return found


def __getattr__(name: str) -> dict[str, Any]:
    if name not in _published():
        raise AttributeError(name)
    return _published()[name]
