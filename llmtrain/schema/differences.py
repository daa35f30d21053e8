"""Differences between the config of a checkpoint and the one to resume it with. No torch here."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticUndefined

from llmtrain.config.base import Section
from llmtrain.config.schema_tree import default_value, is_free
from llmtrain.models.config import ModelConfig
from llmtrain.models.sections.layers import NormConfig
from llmtrain.schema.config import Config
from llmtrain.schema.optimizers import OptimizerSection

ABSENT = object()


class Change(NamedTuple):
    """A setting whose meaning changed, with its values in the form that a checkpoint stores."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {text(self.old)} -> {text(self.new)}"


def differences(old: Mapping[str, Any], new: Config) -> list[str]:
    """One line, `model.d_model: 256 -> 512`, for every setting whose meaning changed; empty when none did.

    old: `config.model_dump(mode="json")` as a checkpoint stores it. A setting it lacks counts as its present
    default. Settings marked `free` (see config.base.free), and all below them, may differ.
    """
    return [str(change) for change in changes(old, new)]


def changes(old: Mapping[str, Any], new: Section, prefix: str = "") -> Iterator[Change]:
    """Changes within any section. prefix: its path and a dot."""
    if old.get("type") not in (None, getattr(new, "type", None)) and not is_free(type(new).model_fields["type"]):
        # Another kind of block or layer: comparing its own settings would say nothing more.
        yield Change(prefix + "type", old["type"], new.type)  # type: ignore[attr-defined]
        if isinstance(new, OptimizerSection):
            groups = new.model_dump(mode="json")["groups"]
            yield from _value_changes(old.get("groups", []), new.groups, groups, f"{prefix}groups")
        return
    if isinstance(new, ModelConfig):
        old, new = _with_norms_written_out(old, new)
    written = new.model_dump(mode="json")
    for name, field in type(new).model_fields.items():
        if is_free(field):
            continue
        before = old.get(name, ABSENT)
        if before is ABSENT and (missing := default_value(field)) is not PydanticUndefined:
            before = missing
        yield from _value_changes(before, getattr(new, name), written[name], prefix + name)
    for name in old:
        if name not in type(new).model_fields:
            yield Change(prefix + name, old[name], ABSENT)


def _with_norms_written_out(old: Mapping[str, Any], new: ModelConfig) -> tuple[Mapping[str, Any], ModelConfig]:
    """Both configs, with model.norm written out in blocks that name a norm in only one of them: naming the same norm is no
    change."""
    before, after = dict(old.get("blocks", {})), dict(new.blocks)
    for name in before.keys() & after.keys():
        was, norm = before[name].get("norm"), after[name].norm
        if was and norm is None:
            after[name] = after[name].model_copy(update={"norm": new.norm})
        elif norm and was is None:
            before[name] = {**before[name], "norm": old.get("norm") or NormConfig().model_dump(mode="json")}
    return {**old, "blocks": before}, new.model_copy(update={"blocks": after})


def _value_changes(old: Any, new: Any, written: Any, path: str) -> Iterator[Change]:
    """new: the decoded value; written: the same as a checkpoint stores it."""
    if isinstance(new, Section) and isinstance(old, Mapping):
        yield from changes(old, new, path + ".")
    elif isinstance(new, dict) and isinstance(old, Mapping):
        for name in new:
            yield from _value_changes(old.get(name, ABSENT), new[name], written[name], f"{path}.{name}")
        for name in old:
            if name not in new:
                yield Change(f"{path}.{name}", old[name], ABSENT)
    elif isinstance(new, list) and isinstance(old, list) and len(new) == len(old):
        for i, (was, value) in enumerate(zip(old, new, strict=True)):
            yield from _value_changes(was, value, written[i], f"{path}.{i}")
    elif old != written:
        yield Change(path, old, written)


def text(value: Any) -> str:
    if value is ABSENT:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)
