"""Decoding plain data into a typed section, with every error in the user's terms. No torch here."""

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from llmtrain.config.base import Problem, Section
from llmtrain.config.report import format_value, nearest, suggest, type_name
from llmtrain.config.schema_tree import (
    constrained_type,
    describe,
    entry_type,
    is_section,
    paths_of_key,
    sections_by_type,
    select_alternative,
)

_ABSENT = object()


def decode(schema: type[Section], data: Any, unreadable: Iterable[str] = ()) -> tuple[Any, list[Problem]]:
    """Decode a config. Returns it with all its problems.

    data: with the defaults filled in.
    unreadable: paths whose values were reported as wrong before; they are not reported again.

    A config with problems lacks the entries that failed to decode (None: all of them); run further rules on it through
    `problems_of_decoded`. pydantic skips the rules of a section when anything inside it fails. They are run here on the
    entries that did decode. A rule is skipped when it reads an entry that failed to decode or broke another rule, so that
    one mistake gives one message.
    """
    unreadable = set(unreadable)
    try:
        return schema.model_validate_json(json.dumps(data)), []
    except ValidationError as error:
        failures = _Failures(schema)
        problems = failures.read(error)
    config = _partial(schema, data, "", failures.paths | unreadable, failures.sections, problems)
    problems = [problem for problem in problems if not _within(problem.path, unreadable)]
    unique = {(problem.path, problem.message): problem for problem in problems}
    return None if config is _ABSENT else config, list(unique.values())


def problems_of_decoded(rule: Iterable[Problem]) -> Iterator[Problem]:
    """Yield the problems that a rule finds, up to the first entry it reads that failed to decode."""
    try:
        yield from rule
    except AttributeError as error:
        if not isinstance(error.obj, Section):
            raise


def _within(path: str, others: Iterable[str]) -> bool:
    return any(path == other or path.startswith(other + ".") for other in others)


class _Failures:
    """Translation of pydantic's errors into problems.

    paths: settings that failed to decode, and those that a misspelt key was probably meant for.
    sections: sections that are wrong although all their settings decoded: a rule is broken, or a key is unknown.
    """

    def __init__(self, schema: type[Section]):
        self.schema = schema
        self.paths: set[str] = set()
        self.sections: set[str] = set()

    def read(self, error: ValidationError) -> list[Problem]:
        details = error.errors(include_url=False)
        # First the misspelt keys: the setting meant by one is then not missing.
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        return [problem for detail in details for problem in self._translate(detail)]

    def _translate(self, detail: Any) -> Iterator[Problem]:
        keys, parent, expected = self._walk(detail["loc"])
        path, found = ".".join(keys), detail["input"]
        prefix = path + "." if path else ""
        match detail["type"]:
            case "rules":
                self.sections.add(path)
                for problem in detail["ctx"]["problems"]:
                    yield Problem(prefix + problem.path, problem.found, problem.message)
            case "extra_forbidden":
                yield self._unknown_key(keys, parent)
            case "missing" if isinstance(detail["loc"][-1], int):
                yield from self._wrong_length(keys[:-1], detail["loc"][:-1], found)
            case "too_long" if get_origin(expected) is tuple:
                yield from self._wrong_length(keys, detail["loc"], found)
            case "missing":
                if path not in self.paths:
                    self.paths.add(path)
                    yield Problem(path, None, f"missing; expected {describe(expected)}")
            case "union_tag_invalid" | "union_tag_not_found":
                self.paths.add(path)
                names = sections_by_type(expected)
                if detail["type"] == "union_tag_not_found":
                    yield Problem(prefix + "type", None, f"missing; expected one of {', '.join(names)}")
                else:
                    tag = found.get("type")
                    yield Problem(prefix + "type", tag, f"unknown type; {suggest(str(tag), names, 'expected one of')}")
            case _:
                self.paths.add(path)
                yield Problem(path, found, self._wrong_value(detail, expected))

    def _walk(self, loc: tuple[str | int, ...]) -> tuple[list[str], Any, Any]:
        """Return (keys as the user wrote them, type of the enclosing section, type expected there).

        pydantic's location also names the `type` of a section that has alternatives; the YAML's path does not.
        """
        keys: list[str] = []
        parent: Any = None
        expected: Any = self.schema
        for part in loc:
            options = sections_by_type(expected)
            if options:
                expected = options[str(part)]
                continue
            keys.append(str(part))
            parent = select_alternative(expected, None)
            expected = entry_type(parent, part)
        return keys, parent, expected

    def _unknown_key(self, keys: list[str], parent: type[Section]) -> Problem:
        path, name = ".".join(keys), keys[-1]
        self.sections.add(".".join(keys[:-1]))
        near = nearest(name, parent.model_fields)
        self.paths |= {".".join([*keys[:-1], field]) for field in near}
        elsewhere = [] if near else list(dict.fromkeys(paths_of_key(name, self.schema)))  # alternatives may share it
        if elsewhere:
            return Problem(path, name, f"unknown key here; did you mean {' or '.join(elsewhere[:2])}?")
        return Problem(path, name, f"unknown key; {suggest(name, parent.model_fields)}")

    def _wrong_length(self, keys: list[str], loc: tuple[str | int, ...], found: Any) -> Iterator[Problem]:
        path = ".".join(keys)
        if path not in self.paths:
            self.paths.add(path)
            yield Problem(path, found, f"expected {describe(self._walk(loc)[2])}, found {len(found)}")

    def _wrong_value(self, detail: Any, expected: Any) -> str:
        found = detail["input"]
        if detail["type"] == "setting":
            return f"{detail['msg']}, found {format_value(found)}"
        choices = (
            [str(choice) for choice in get_args(select_alternative(expected, found))]
            if detail["type"] == "literal_error"
            else []
        )
        near = nearest(found, choices) if isinstance(found, str) else []
        if choices:
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
        else:
            hint = _hint(describe(expected), found)
        what = "nothing" if found is None else format_value(found)
        if detail["type"].endswith("_type") and isinstance(found, (str, int, float)):
            what += f" ({type_name(found)})"
        return f"expected {describe(expected)}, found {what}{hint}"


def _hint(expected: str, found: Any) -> str:
    if isinstance(found, float) and expected.startswith("an integer") and found.is_integer():
        return f"; write {int(found)}"
    if isinstance(found, str) and expected == "true or false" and found.lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if found.lower() in ('yes', 'on') else 'false'}"
    if isinstance(found, str) and expected.startswith(("an integer", "a number", "true or false")):
        # The text of `${oc.env:NAME}` comes here as well.
        hint = "; leave out the quotes (of an environment variable: ${oc.decode:${oc.env:NAME}})"
        return hint if _is_number(found) or found in ("true", "false") else ""
    if expected.startswith("a string") and isinstance(found, (int, float)):
        return "; put it in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _partial(
    annotation: Any, value: Any, path: str, failing: set[str], broken: set[str], problems: list[Problem]
) -> Any:
    """Decode the valid parts of `value`; _ABSENT without any. Adds what the rules of its sections find to `problems`."""
    if path in failing:
        return _ABSENT
    if path and not any(_within(other, [path]) for other in failing | broken):
        return _adapter(annotation).validate_json(json.dumps(value))
    kind = select_alternative(annotation, value)
    prefix = path + "." if path else ""
    if get_origin(kind) is dict:
        entry = get_args(kind)[1]
        items = {key: _partial(entry, item, prefix + key, failing, broken, problems) for key, item in value.items()}
        return _ABSENT if _ABSENT in items.values() else items
    if not is_section(kind):
        return _ABSENT
    fields = {
        name: _partial(constrained_type(field), value[name], prefix + name, failing, broken, problems)
        if name in value
        else _ABSENT
        for name, field in kind.model_fields.items()
    }
    section = kind.model_construct(**{name: item for name, item in fields.items() if item is not _ABSENT})
    for name in fields:
        if fields[name] is _ABSENT:
            vars(section).pop(name, None)  # model_construct fills in defaults; this one is not known
    for problem in list(problems_of_decoded(section.problems())):
        problems.append(Problem(prefix + problem.path, problem.found, problem.message))
        _hide(section, problem.path)
    return section


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _hide(section: Section, path: str) -> None:
    """Remove a setting that breaks a rule, so that the rules of enclosing sections skip it."""
    name, _, rest = path.partition(".")
    value = vars(section).get(name)
    if isinstance(value, dict) and rest:
        entry, _, rest = rest.partition(".")
        if rest and isinstance(value.get(entry), Section):
            _hide(value[entry], rest)
        else:
            value.pop(entry, None)
    elif isinstance(value, Section) and rest:
        _hide(value, rest)
    else:
        vars(section).pop(name, None)
