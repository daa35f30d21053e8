"""The error report of a config, one aligned line per problem. No torch here."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.errors import UserError

_LONGEST_VALUE = 60
_WIDEST_PATH = 48


class ConfigError(UserError):
    """A config that cannot be used. `problems` holds every reason; `str()` is the whole report.

    title: what was read, usually the file as the user named it.
    origins: dotted path -> line number in the file, or 'override'.
    """

    def __init__(self, title: str, problems: Sequence[Problem], origins: Mapping[str, int | str] | None = None):
        self.title, self.origins = title, dict(origins or {})
        self.problems = sorted(problems, key=lambda problem: self._position(problem.path))
        super().__init__(self._report())

    def _position(self, path: str) -> float:
        where = origin(path, self.origins)
        return where if isinstance(where, int) else float("inf")

    def _report(self) -> str:
        if len(self.problems) == 1 and not self.problems[0].path:
            return f"{self.title}: {_sentence(self.problems[0])}"
        rows = [(p.path, _place(p.path, self.origins), _sentence(p)) for p in self.problems]
        width = min(max(len(path) for path, _, _ in rows), _WIDEST_PATH)
        place_width = max(len(place) for _, place, _ in rows)
        count = f"{len(rows)} error" + "s" * (len(rows) > 1)
        lines = [f"{path:{width}}  {place:{place_width}}  {text}" for path, place, text in rows]
        return "\n  ".join([f"{self.title}: {count}", *lines])


def origin(path: str, origins: Mapping[str, int | str]) -> int | str | None:
    """Line number (or 'override') of a setting, or of the nearest enclosing section if it is absent."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path)


def _place(path: str, origins: Mapping[str, int | str]) -> str:
    where = origin(path, origins)
    return f"line {where}" if isinstance(where, int) else where or ""


def _sentence(problem: Problem) -> str:
    """The message, preceded by the value unless the line already shows it."""
    value = format_value(problem.found)
    shown = problem.found is None or problem.found == problem.path.rpartition(".")[2] or _has(problem.message, value)
    return problem.message if shown else f"{value}: {problem.message}"


def _has(message: str, value: str) -> bool:
    """Look for a value that stands in a message by itself, not within another number, name or path."""
    return re.search(rf"(?<![\w./-]){re.escape(value)}(?![\w/-]|\.\w)", message) is not None


def format_value(value: Any) -> str:
    """Format a value as in YAML, cut to a readable length; without characters that would act on a terminal."""
    if isinstance(value, str):
        text = "'" + "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in value[:500]) + "'"
    else:
        text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 4] + " ..." + text[-1]


def type_name(value: Any) -> str:
    """Name the type of a value: 'a string'."""
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "a mapping" if isinstance(value, Mapping) else "empty")


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The one or two names closest to a misspelt `name`; empty when none is close."""
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in names}
    wanted = name.lower().replace("-", "_")
    near = difflib.get_close_matches(wanted, plain, n=2, cutoff=0.65)
    ratios = [difflib.SequenceMatcher(None, wanted, candidate).ratio() for candidate in near]
    return [plain[candidate] for candidate, ratio in zip(near, ratios, strict=True) if ratio > ratios[0] - 0.1]


def suggest(name: str, names: Iterable[str], allowed: str = "allowed") -> str:
    """`did you mean x?`, or the list of valid names when none is near."""
    names = list(names)
    near = nearest(name, names)
    return f"did you mean {' or '.join(near)}?" if near else f"{allowed}: {', '.join(sorted(names)) or 'nothing'}"
