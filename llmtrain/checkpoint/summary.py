"""Summary of a checkpoint, in lines for a terminal. No torch here."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format.index import Index
from llmtrain.config.base import Section
from llmtrain.config.schema_tree import (
    constrained_type,
    default_value,
    entry_type,
    is_section,
    sections_by_type,
    select_alternative,
)
from llmtrain.progress import format_bytes
from llmtrain.schema.config import Config
from llmtrain.schema.differences import changes, text


def summary(checkpoint: Checkpoint, config_file: str | None) -> Iterator[str]:
    """Lines about a checkpoint. config_file: a YAML to compare its config with, rather than with the defaults.

    Raises CheckpointError for a damaged index, ConfigError for a YAML that is wrong.
    """
    manifest = checkpoint.require()
    yield f"{checkpoint.address}: format {manifest.format}, save {manifest.save_id}"
    yield f"step       {manifest.step:,}"
    yield f"tokens     {manifest.tokens:,}"
    yield f"size       {format_bytes(manifest.nbytes)} in {len(manifest.files)} files"
    yield f"clock      {_pairs(manifest.clock)}"
    yield f"data       {_position(manifest.data)}"
    yield f"versions   {_pairs(manifest.versions)}"
    if manifest.base is not None:
        yield f"base       {manifest.base['address']}, save {manifest.base['save_id']}: the parameters that are not here"
    yield from _tensors(checkpoint.read_index())
    if config_file is None:
        lines = list(_set(Config, manifest.config, ""))
        yield f"config     {len(lines)} settings that are not the default"
    else:
        lines = _compared(manifest.config, config_file)
        yield f"config     {len(lines)} differences in meaning: here -> {config_file}"
    yield from (f"  {line}" for line in lines)


def _tensors(index: Index) -> Iterator[str]:
    for part in ("model", "optimizer", "ema"):
        found = [record for name, record in index.tensors.items() if name.startswith(f"{part}.")]
        if part == "ema" and not found:
            continue
        elements = sum(math.prod(record.shape) for record in found)
        nbytes = sum(math.prod(record.shape) * _itemsize(record.dtype) for record in found)
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in Counter(r.dtype for r in found).most_common())
        kinds = f" ({dtypes}): {elements:,} numbers, {format_bytes(nbytes)}" if found else ""
        yield f"{part:10} {len(found)} tensors{kinds}"


def _itemsize(dtype: str) -> int:
    """Bytes of an element, from safetensors' name of its type: the first number in it is the number of bits."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1  # BOOL


def _position(data: Mapping[str, Any]) -> str:
    position = data.get("position")
    if not isinstance(position, Mapping):
        return "none: weights alone"
    passed = "".join(
        f"; {count} steps' worth passed over after step {step}" for step, count in data.get("passed_over", [])
    )
    return f"{_pairs(position)}; fingerprint {data.get('fingerprint')}{passed}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {text(value)}" for name, value in values.items()) or "none"


def _compared(old: Mapping[str, Any], file: str) -> list[str]:
    from llmtrain.schema.load import load_config

    new = load_config(file)
    if set(old) == {"model", "data"}:  # imported: there is no run to compare
        return [str(change) for change in changes(old["model"], new.model, "model.")]
    return [str(change) for change in changes(old, new)]


def _set(section: type[Section], values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """`path: value` for every setting that is not at its default."""
    for name, field in section.model_fields.items():
        if name in values and values[name] != default_value(field):
            yield from _settings_of(constrained_type(field), values[name], prefix + name)


def _settings_of(annotation: Any, value: Any, path: str) -> Iterator[str]:
    kind = select_alternative(annotation, value)
    if isinstance(value, Mapping) and is_section(kind):
        if sections_by_type(annotation):  # which alternative it is, at its default too
            yield f"{path}.type: {value['type']}"
            value = {name: entry for name, entry in value.items() if name != "type"}
        yield from _set(kind, value, f"{path}.")
    elif isinstance(value, Mapping) and get_origin(kind) is dict:
        for key, entry in value.items():
            yield from _settings_of(entry_type(kind, key), entry, f"{path}.{key}")
    else:
        yield f"{path}: {text(value)}"
