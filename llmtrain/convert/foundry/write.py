"""Text of a migrated YAML: what is left to decide as comments at the top, then the sections."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from llmtrain.config.report import format_value
from llmtrain.config.yaml_source import Loader
from llmtrain.convert.foundry.settings import Note, Notes

_WIDTH = 118
_FLOW = {"norm", "mlp", "position", "scaling", "init", "loss", "sharding", "activation_checkpointing", "wandb"}
_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./${}:,* ()+@-]*")


def write(source: str, sections: Mapping[str, Any], comments: Mapping[str, str], notes: Notes) -> str:
    """source: name of the file that was migrated. comments: dotted path -> remark behind that key."""
    lines = [
        "# yaml-language-server: $schema=yamls/schema.json",
        f"# Migrated by `llmtrain migrate` from LLM Foundry's {source}.",
    ]
    if notes.left:
        lines += ["#", f"# Left to decide, because it has no equal here ({len(notes.left)}):"]
        lines += [f"#   {line}" for line in listed(notes.left, values=True)]
    if notes.harmless:
        lines += ["#", f"# Not needed here ({len(notes.harmless)}):"]
        lines += [f"#   {line}" for line in listed(notes.harmless, values=False)]
    scalars = True
    for key, value in sections.items():
        if isinstance(value, dict) or not scalars:
            lines.append("")
        scalars = not isinstance(value, dict)
        lines += _entry(key, value, 0, key, comments)
    return "\n".join(lines) + "\n"


def listed(notes: Iterable[Note], values: bool) -> list[str]:
    """Lines that name the keys, with their values where wanted, and the reason; keys with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for note in notes:
        value = " (default)" if note.value == "(default)" else f": {format_value(note.value)}"
        reasons.setdefault(note.text, []).append(note.path + value if values else note.path)
    lines = []
    for text, paths in reasons.items():
        wrapped = textwrap.wrap(
            f"{', '.join(paths)} – {text}", _WIDTH - 4, break_long_words=False, break_on_hyphens=False
        )
        lines += [wrapped[0], *(f"  {line}" for line in wrapped[1:])]
    return lines


def _entry(key: str, value: Any, depth: int, path: str, comments: Mapping[str, str]) -> list[str]:
    indent = "  " * depth
    remark = f"  # {comments[path]}" if comments.get(path) else ""
    if isinstance(value, dict) and value:
        flow = f"{indent}{key}: {flow_text(value)}{remark}"
        if key in _FLOW and len(flow) <= _WIDTH:
            return [flow]
        lines = [f"{indent}{key}:{remark}"]
        for name, item in value.items():
            lines += _entry(name, item, depth + 1, f"{path}.{name}", comments)
        return lines
    return [f"{indent}{key}: {flow_text(value)}{remark}"]


def flow_text(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_in_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_in_flow(item) for item in value) + "]"
    if isinstance(value, str):
        return value if _is_plain(value) else yaml.safe_dump(value, default_style='"', width=10**6).strip()
    return "null" if value is None else repr(value).lower() if isinstance(value, bool) else repr(value)


def _in_flow(value: Any) -> str:
    text = flow_text(value)
    return f'"{text}"' if isinstance(value, str) and not text.startswith('"') and set("{}[],?") & set(text) else text


def _is_plain(text: str) -> bool:
    """True if the text, written without quotes, is read as the same string."""
    if not _PLAIN.fullmatch(text) or ": " in text or text.endswith((":", " ")):
        return text == "???"
    return yaml.load(text, Loader) == text
