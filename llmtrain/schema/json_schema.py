"""JSON schema with which editors complete and check the YAML. No torch here."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from llmtrain.schema.config import Config

_INTERPOLATION = {"$ref": "#/$defs/Interpolation"}


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the whole YAML, from the same types that decode it.

    Every scalar and list may also be a `${...}` interpolation, except the `type` that distinguishes sections:
    editors complete it from the constants.
    """
    schema = Config.model_json_schema(mode="validation")
    definitions = schema.pop("$defs")
    schema = {"$schema": GenerateJsonSchema.schema_dialect, **_adapt(schema, definitions)}
    schema["$defs"] = {name: _adapt(definition, definitions) for name, definition in definitions.items()}
    schema["$defs"]["Interpolation"] = {
        "type": "string",
        "pattern": r"^.*\$\{.*\}.*$",
        "description": "The value of another setting, ${section.key}, or of an environment variable, ${oc.env:NAME}.",
    }
    return schema


def schema_text() -> str:
    """Text of yamls/schema.json."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _adapt(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_adapt(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "oneOf" in node:
        for choice in node["oneOf"]:
            # The decoder asks for `type` even where the section has a default for it, but for the one of config.base.ByType.
            section = definitions[choice["$ref"].rpartition("/")[2]]
            if section["properties"]["type"].get("default") != node.get("default_type", NotImplemented):
                section["required"] = sorted({"type", *section.get("required", [])})
    adapted: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":  # names here are settings, not keywords of JSON schema
            adapted[key] = {name: _adapt(entry, definitions) for name, entry in value.items()}
        elif key in ("default", "examples", "enum"):
            adapted[key] = value
        elif key not in ("default_type", "discriminator", "resume", "title"):
            adapted[key] = _adapt(value, definitions)
    if "anyOf" in adapted:
        adapted["anyOf"] = _flat(adapted["anyOf"])
    if node.get("resume") == "free":
        note = "May change when a run is resumed."
        adapted["description"] = f"{adapted['description']} {note}" if "description" in adapted else note
    return _interpolated(adapted) if node.get("type") in _SCALARS and "const" not in node else adapted


def _flat(choices: list[Any]) -> list[Any]:
    """List of all choices, with those of nested choices, each once."""
    flat: list[Any] = []
    for choice in choices:
        flat += [inner for inner in choice.get("anyOf", [choice]) if inner not in flat]
    return flat


_SCALARS = ("integer", "number", "boolean", "string", "array")
_ABOUT = ("description", "default", "examples")


def _interpolated(node: dict[str, Any]) -> dict[str, Any]:
    """Schema of a scalar or list that may also be written as an interpolation."""
    if set(node) - {*_ABOUT, "type"} == set() and node["type"] == "string":
        return node  # any text is allowed already
    about = {key: value for key, value in node.items() if key in _ABOUT}
    return {"anyOf": [{key: value for key, value in node.items() if key not in about}, _INTERPOLATION], **about}
