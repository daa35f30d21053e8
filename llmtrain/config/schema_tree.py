"""The schema as a tree: types, defaults and descriptions of settings by dotted path. No torch here."""

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from llmtrain.config.base import ByType, Duration, Section


def alternatives_of(annotation: Any) -> list[Any]:
    """The alternatives of a type, without null and without Annotated wrappers."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in alternatives_of(part)]
    return [] if annotation in (None, type(None)) else [annotation]


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def sections_by_type(annotation: Any) -> dict[str, type[Section]]:
    """Sections by `type`, for a union of sections that differ in it. Empty for every other type."""
    sections = [member for member in alternatives_of(annotation) if is_section(member)]
    if len(sections) < 2:
        return {}
    return {name: section for section in sections for name in get_args(section.model_fields["type"].annotation)}


def select_alternative(annotation: Any, value: Any) -> Any:
    """The alternative that fits `value`; None when its `type` is missing or unknown."""
    options = sections_by_type(annotation)
    if options:
        tag = value.get("type", usual_type(annotation)) if isinstance(value, Mapping) else None
        return options.get(tag) if isinstance(tag, str) else None
    alternatives = alternatives_of(annotation)
    return alternatives[0] if alternatives else None


def usual_type(annotation: Any) -> str | None:
    """The `type` that a mapping without one has; None where it must be written."""
    return found.default if (found := _by_type(annotation)) else None


def _by_type(annotation: Any) -> ByType | None:
    return next((part for part in _constraints(annotation) if isinstance(part, ByType)), None)


def constrained_type(field: FieldInfo) -> Any:
    """A field's type together with its constraints."""
    metadata = tuple(field.metadata)
    return Annotated[(field.annotation, *metadata)] if metadata else field.annotation


def entry_type(annotation: Any, key: str | int) -> Any:
    """The type of one entry of a section, mapping, list or tuple; None where there is no such entry."""
    arguments = get_args(annotation)
    if is_section(annotation):
        field = annotation.model_fields.get(str(key))
        return constrained_type(field) if field else None
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) is tuple and isinstance(key, int):
        return arguments[key] if key < len(arguments) else None
    return arguments[0] if get_origin(annotation) is list else None


def default_value(field: FieldInfo) -> Any:
    """A field's default as it would be written in YAML; PydanticUndefined when it is required."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return value
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return str(value) if isinstance(value, Duration) else to_jsonable_python(value)


def is_free(field: FieldInfo) -> bool:
    """True for a field marked by `config.base.free`: it may change between a run and its resumption."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("resume") == "free"


def with_defaults(annotation: Any, value: Any) -> Any:
    """Fill in the default of every absent setting, so that interpolations may refer to it, and write a section that is given by
    the name of its type alone as a mapping."""
    if isinstance(value, str) and (found := _by_type(annotation)) and found.by_name and "${" not in value:
        value = {"type": value}
    kind = select_alternative(annotation, value)
    if is_section(kind) and isinstance(value, Mapping):
        filled = {key: with_defaults(entry_type(kind, key), item) for key, item in value.items()}
        for name, field in kind.model_fields.items():
            if name not in filled and (absent := default_value(field)) is not PydanticUndefined:
                filled[name] = absent
        return filled
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {key: with_defaults(entry_type(kind, key), item) for key, item in value.items()}
    return value


def paths_of_key(name: str, section: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the settings named `name`, outside of named entries and lists."""
    for key, field in section.model_fields.items():
        if key == name:
            yield prefix + key
        for member in alternatives_of(field.annotation):
            if is_section(member):
                yield from paths_of_key(name, member, f"{prefix}{key}.")


def describe(annotation: Any) -> str:
    """Describe the allowed values: 'an integer above 0', "one of 'none', 'alibi'", ..."""
    if options := sections_by_type(annotation):
        return "a mapping with type: " + " or ".join(options)
    texts = [_describe_one(member, _bounds(annotation)) for member in alternatives_of(annotation)]
    optional = type(None) in _arguments(annotation)
    return " or ".join(dict.fromkeys([*texts, *(["null"] if optional else [])]))


def _describe_one(kind: Any, bounds: str) -> str:
    if kind in (int, float):
        return ("an integer" if kind is int else "a number") + bounds
    names = {
        bool: "true or false",
        str: "a string",
        Duration: "a number with a unit, such as '300 steps' or '26e9 tokens'",
    }
    if kind in names:
        return names[kind]
    origin = get_origin(kind)
    if origin is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return ("one of " if len(choices) > 1 else "") + ", ".join(choices)
    if origin is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if origin is list:
        return "a list" + bounds
    if origin is dict:
        return "a mapping" + bounds
    required = [name for name, field in kind.model_fields.items() if field.is_required()] if is_section(kind) else []
    return "a mapping" + (f" with {', '.join(required)}" if required else "")


def _arguments(annotation: Any) -> Sequence[Any]:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _bounds(annotation: Any) -> str:
    """' above 0', ' from 0 to 1': the constraints that Annotated carries, here or in an alternative."""
    words = {
        "gt": "above {}",
        "ge": "at least {}",
        "lt": "below {}",
        "le": "at most {}",
        "min_length": "with {} or more entries",
    }
    found: dict[str, str] = {}
    for part in (annotation, *_arguments(annotation)):
        for constraint in _constraints(part):
            for name, text in words.items():
                if (bound := getattr(constraint, name, None)) is not None:  # the last is the narrowest
                    found[name] = text.format(f"{bound:g}" if isinstance(bound, float) else bound)
    return " " + " and ".join(found.values()) if found else ""


def _constraints(annotation: Any) -> Iterator[Any]:
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        for constraint in metadata:
            yield from constraint.metadata if isinstance(constraint, FieldInfo) else [constraint]
