"""What changed between the config of a checkpoint and the one that wants to resume it. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from llmtrain.config.base import Section
from llmtrain.config.schema import Config
from llmtrain.config.walk import default

_ABSENT = object()


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """One line, `model.d_model: 256 -> 512`, for every setting whose meaning changed; empty when none did.

    old: `config.model_dump(mode="json")` as a checkpoint stores it. A setting it lacks counts as its present
    default. Settings marked `free` (see config.base.free), and all below them, may differ.
    """
    return list(_of_section(old, new, ""))


def _of_section(old: Mapping[str, Any], new: Section, prefix: str) -> Iterator[str]:
    if old.get("type") not in (None, getattr(new, "type", None)) and not _is_free(type(new).model_fields["type"]):
        # Another kind of block or layer: comparing its other settings would say nothing more.
        yield _line(prefix + "type", old["type"], new.type)  # type: ignore[attr-defined]
        return
    written = new.model_dump(mode="json")
    for name, field in type(new).model_fields.items():
        if _is_free(field):
            continue
        before = old.get(name, _ABSENT)
        if before is _ABSENT and (missing := default(field)) is not PydanticUndefined:
            before = missing
        yield from _of_value(before, getattr(new, name), written[name], prefix + name)
    for name in old:
        if name not in type(new).model_fields:
            yield _line(prefix + name, old[name], _ABSENT)


def _of_value(old: Any, new: Any, written: Any, path: str) -> Iterator[str]:
    """new: the decoded value; written: the same as a checkpoint stores it."""
    if isinstance(new, Section) and isinstance(old, Mapping):
        yield from _of_section(old, new, path + ".")
    elif isinstance(new, dict) and isinstance(old, Mapping):
        for name in new:
            yield from _of_value(old.get(name, _ABSENT), new[name], written[name], f"{path}.{name}")
        for name in old:
            if name not in new:
                yield _line(f"{path}.{name}", old[name], _ABSENT)
    elif old != written:
        yield _line(path, old, written)


def _is_free(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("resume") == "free"


def _line(path: str, old: Any, new: Any) -> str:
    return f"{path}: {_text(old)} -> {_text(new)}"


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)
