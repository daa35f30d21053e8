"""Every key of LLM Foundry's pretraining YAMLs, in keys.yaml: what it becomes here, or why it becomes nothing.

The migration page's table is made from these, and `notes.py` reads the reasons from them. Below `eval_loader` the keys are
those of `train_loader`; a key stands for all keys below it that are not listed themselves.
"""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

_TABLES = yaml.safe_load(Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8"))
MAPPED: dict[str, tuple[str, str]] = {key: (ours, remark) for key, (ours, remark) in _TABLES["mapped"].items()}
"""Key -> (ours, remark)."""
NOT_NEEDED: dict[str, str] = _TABLES["not_needed"]
"""Keys that change nothing of what is learned, with the reason why ours has none."""
MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    key: (tuple(harmless), why) for key, (harmless, why) in _TABLES["missing"].items()
}
"""Key -> (values without effect, why there is no counterpart and what to do)."""
SAME = {"eval_gauntlet_str": "eval_gauntlet", "icl_tasks_str": "icl_tasks", "eval_loaders": "eval_loader"}
"""Keys that are other spellings of one above."""


class Meaning(NamedTuple):
    """A row of the tables. kind: mapped, not needed or missing. harmless: values of a missing key that change nothing."""

    kind: str
    text: str
    harmless: tuple[Any, ...] = ()


def meaning(path: str) -> Meaning | None:
    """Entry of the tables for a key, or for the nearest one above it; None for a key that LLM Foundry does not have."""
    parts = [part for part in path.split(".") if not part.isdigit()]
    if len(parts) > 1 and SAME.get(parts[0], parts[0]) == "eval_loader":
        parts[0] = "train_loader"
    parts[:1] = [SAME.get(part, part) for part in parts[:1]]
    for end in range(len(parts), 0, -1):
        key = ".".join(parts[:end])
        if key in NOT_NEEDED:
            return Meaning("not needed", NOT_NEEDED[key])
        if key in MISSING:
            return Meaning("missing", MISSING[key][1], MISSING[key][0])
        if key in MAPPED and end == len(parts):
            return Meaning("mapped", MAPPED[key][0])
    return None


def table() -> str:
    """The Markdown table of the migration page."""
    rows = ["| LLM Foundry | llmtrain | remark |", "|---|---|---|"]
    rows += [_row(key, ours, remark) for key, (ours, remark) in MAPPED.items()]
    rows += [
        "",
        "Not needed, because nothing of what is learned depends on it:",
        "",
        "| LLM Foundry | reason |",
        "|---|---|",
    ]
    rows += [f"| `{key}` | {reason} |" for key, reason in NOT_NEEDED.items()]
    rows += ["", "Without a counterpart, and named in the output where the value matters:", ""]
    rows += ["| LLM Foundry | why, and what to do |", "|---|---|"]
    rows += [f"| `{key}` | {reason} |" for key, (_, reason) in MISSING.items()]
    return "\n".join(rows) + "\n"


def _row(key: str, ours: str, remark: str) -> str:
    names = ", ".join(f"`{name}`" for name in ours.split(", ")) if ours else "–"
    return f"| `{key}` | {names} | {remark} |"
