"""Reading of a foreign YAML key by key, so that what nobody read is known in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.config.report import type_name
from llmtrain.convert.foundry.keys import meaning

LEAST: dict[str, int] = dict.fromkeys(
    (
        "d_model",
        "n_heads",
        "n_layers",
        "vocab_size",
        "max_seq_len",
        "global_train_batch_size",
        "kv_n_heads",
        "head_dim",
    ),
    1,
)
"""Key -> its least value."""
_MOST = 2**53


@dataclass(frozen=True)
class Note:
    """A setting that was not carried over as it stood. value: as written, or "(default)" where the file has no such key."""

    path: str
    value: Any
    text: str


@dataclass
class Notes:
    """Remarks of a migration. left: meaning that our YAML does not have. harmless: settings that ours needs no key for.

    problems: values that LLM Foundry itself could not read.
    """

    left: list[Note] = field(default_factory=list)
    harmless: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class Settings:
    """One section of the foreign YAML. Every `take` marks a key as read; `unread` tells about the others."""

    def __init__(self, data: Any, notes: Notes, path: str = ""):
        if not isinstance(data, dict):
            notes.problems.append(Problem(path, data, f"expected a mapping, found {type_name(data)}"))
            data = {}
        self.data, self.notes, self.path = data, notes, path
        self._read: set[str] = set()
        self._sections: dict[str, Settings] = {}

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def skip(self, *keys: str) -> None:
        """Mark keys as read."""
        self._read.update(keys)

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, or the default where it is absent or blank. A value of another type, or out of the key's range, is a
        problem."""
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if isinstance(value, bool) and bool not in kinds:
            kinds = ()
        if isinstance(value, (int, float)) and not LEAST.get(key, -_MOST) <= value <= _MOST:
            wanted = f"{LEAST[key]} or more, and at most {_MOST}" if key in LEAST else "a finite number below 2^53"
            self.notes.problems.append(Problem(self.at(key), value, f"expected {wanted}"))
            return default
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kinds == (int,) and isinstance(value, float) and value == int(value):
            return int(value)
        if not isinstance(value, kinds):
            wanted = {int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a mapping"}
            names = " or ".join(wanted.get(k, "a list") for k in (kind if isinstance(kind, tuple) else (kind,)))
            self.notes.problems.append(Problem(self.at(key), value, f"expected {names}, found {type_name(value)}"))
            return default
        return value

    def take_numbers(self, key: str, default: list[float]) -> list[float]:
        """A list of numbers."""
        found = self.take(key, list, default)
        entries = Settings({str(place): item for place, item in enumerate(found)}, self.notes, self.at(key))
        return [entries.take(place, float, 0.0) for place in entries.data]

    def section(self, key: str) -> Settings:
        """A mapping below this one; empty where it is absent."""
        if key not in self._sections:
            self._sections[key] = Settings(self.take(key, dict, {}), self.notes, self.at(key))
        return self._sections[key]

    def adopt(self, section: Settings) -> None:
        """Let a section that was made elsewhere take part in `unread`."""
        self._sections[section.path] = section

    def left(self, key: str, text: str) -> None:
        """Note that a key means something which ours cannot say."""
        self._read.add(key)
        self.notes.left.append(Note(self.at(key), self.data.get(key, "(default)"), text))

    def harmless(self, key: str, text: str) -> None:
        self._read.add(key)
        self.notes.harmless.append(Note(self.at(key), self.data.get(key, "(default)"), text))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Path and value of every key that nobody took."""
        for key, value in self.data.items():
            if key not in self._read:
                yield self.at(key), value
        for section in self._sections.values():
            yield from section.unread()


def note_unread(settings: Settings) -> None:
    """Adds a note for each key that was not read: not needed, without counterpart, or unknown."""
    for path, value in settings.unread():
        found = meaning(path)
        if found is None:
            text = "is no key of LLM Foundry's that is known here; it was not carried over"
            settings.notes.left.append(Note(path, value, text))
        elif isinstance(value, dict) and value and found.kind == "missing" and value not in found.harmless:
            below = Settings(value, settings.notes, path)
            known = [key for key in value if meaning(f"{path}.{key}") != found]
            if known:
                note_unread(below)
            else:
                settings.notes.left.append(Note(path, value, found.text))
        elif found.kind == "missing" and value not in found.harmless:
            settings.notes.left.append(Note(path, value, found.text))
        else:
            text = "has no effect here" if found.kind == "mapped" else found.text
            has_value = found.kind == "missing"
            settings.notes.harmless.append(Note(path, value, "means nothing at this value" if has_value else text))
