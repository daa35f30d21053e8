"""Mutants of YAML files: one to three changes of a good file, most of which make it a bad one."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

EXTREMES: list[Any] = [
    *(0, -1, 1, 2, 7, 255, 65_537, 10**6, 10**9, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 10**30, 10**400),
    *(-(2**63), 0.0, -0.0, 0.5, 1.0, 1.5, -1e-3, 1e-300, 1e-38, 1e12, 1e300, float("inf"), float("-inf"), float("nan")),
]
TEXTS: list[str] = [
    *(
        "",
        " ",
        "x",
        "0",
        "1e3",
        "yes",
        "null",
        "~",
        "???",
        "a b",
        "a/b",
        "../x",
        "/",
        "/dev/null/x",
        "~nobody-here/x",
        ".",
    ),
    *("1e400 tokens", "-3 steps", "0 steps", "5 %", "101 %", "1e-5 epochs", "nan steps", "99999999999999999999 steps"),
    *(
        "(" * 2000,
        "m*" + "9" * 500,
        "m*9999999",
        "m**2",
        "m+",
        "+m",
        "m*0",
        "x" * 300,
        "x" * 50_000,
        "ü",
        "\u202e",
        "日本",
    ),
    *(
        "\x07",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "\ufeff",
        "a\nb",
        "{{",
        "{{ x",
        "{{ 9**9**9**9 }}",
        "{% for %}",
        "(",
        "[",
        "*",
    ),
    *("${", "${}", "${name}", "${${name}}", "${model.d_model}", "${model}", "${model.${name}}", "${nope.nope}", "${.}"),
    *(
        "${oc.env:NOPE}",
        "${oc.env:NOPE,3}",
        "${oc.decode:3}",
        "${oc.decode:'}",
        "${x:y}",
        "${" * 50,
        "${a}" * 300,
        "\\${x}",
    ),
]
STRUCTURES: list[Any] = [None, True, False, [], {}, [[]], {"a": 1}, [None], {"type": "x"}, {"type": []}, ["x"] * 50]
TAGS = [
    "!!timestamp 2001-01-01",
    "!!binary aGk=",
    "!!set {a}",
    "!!int x",
    "!!python/object:os.system {}",
    "!x y",
    "2001-01-01",
]


@dataclass(frozen=True)
class Mutant:
    """Text of a file, and overrides to read it with."""

    text: str
    overrides: tuple[str, ...] = ()


def mutant(rng: random.Random, sources: Sequence[str]) -> Mutant:
    """One mutant of sources[0]; the others lend subtrees."""
    tree = yaml.safe_load(sources[0])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_TREE)(rng, tree, sources)
    text = _dump(rng, tree)
    if rng.random() < 0.25:
        text = rng.choice(_TEXT)(rng, text)
    overrides = tuple(_override(rng, tree) for _ in range(rng.choice([0, 0, 0, 0, 1, 1, 2])))
    return Mutant(text, overrides)


def _dump(rng: random.Random, tree: Any) -> str:
    def write(value: Any) -> str:
        try:
            return yaml.safe_dump(value, sort_keys=False, allow_unicode=rng.random() < 0.5, width=10**6)
        except (yaml.YAMLError, ValueError):  # a key that is a list, an integer of 10^400
            return repr(value)

    if not isinstance(tree, dict):
        return write(tree)
    parts = []
    for key, value in tree.items():
        if isinstance(value, int) and abs(value) >= 10**300:
            parts.append(f"{key}: {'9' * 5000}\n")
        else:
            parts.append(write({key: value}))
    return "".join(parts)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value."""
    found: list[tuple[Any, Any]] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += [(tree, key), *places(value)]
    return found


def _place(rng: random.Random, tree: Any) -> tuple[Any, Any]:
    return rng.choice(places(tree) or [({}, "")])


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(rng.choice([EXTREMES, TEXTS, TEXTS, STRUCTURES])))


def _replace(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    container, key = _place(rng, tree)
    container[key] = _value(rng)


def _replace_number(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    numbers = [(at, key) for at, key in places(tree) if type(at[key]) in (int, float)]
    container, key = rng.choice(numbers or [({}, "")])
    container[key] = rng.choice(EXTREMES)


def _delete(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    container, key = _place(rng, tree)
    if container:
        del container[key]


def _rename(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    container, key = _place(rng, tree)
    if isinstance(container, dict) and container:
        new = rng.choice(
            [f"{key}s", f"{key}"[1:], f"{key}.{key}", f"{key}"[::-1], "x" * 500, "", "ü", 3, None, "type", "a b"]
        )
        container[new] = container.pop(key)


def _add(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    container, key = _place(rng, tree)
    if isinstance(container, dict):
        container[rng.choice([f"{key}2", "type", "name", "lr", "extra", "seq_len"])] = _value(rng)
    else:
        container.insert(key, _value(rng))


def _swap(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    (one, a), (other, b) = _place(rng, tree), _place(rng, tree)
    if one and other:
        left, right = copy.deepcopy(one[a]), copy.deepcopy(other[b])
        one[a] = right
        if b in other if isinstance(other, dict) else b < len(other):
            other[b] = left


def _graft(rng: random.Random, tree: Any, sources: Sequence[str]) -> None:
    """A subtree of another file."""
    donor, theirs = _place(rng, yaml.safe_load(rng.choice(sources)))
    container, key = _place(rng, tree)
    if donor:
        container[rng.choice([key, theirs]) if isinstance(container, dict) else key] = donor[theirs]


def _nest(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    container, key = _place(rng, tree)
    value = container.get(key) if isinstance(container, dict) else container[key]
    for _level in range(rng.choice([1, 2, 30, 60])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    container[key] = value


def _refer(rng: random.Random, tree: Any, _: Sequence[str]) -> None:
    """An interpolation of a path of the file, sometimes in a circle."""
    container, key = _place(rng, tree)
    names = [name for at, name in places(tree) if at is tree or rng.random() < 0.3]
    path = ".".join(str(name) for name in rng.choices(names or ["x"], k=rng.choice([1, 2, 3])))
    container[key] = rng.choice([f"${{{path}}}", f"a${{{path}}}b", f"${{{key}}}", f"${{${{{path}}}}}", f"${{{path}"])


_TREE: list[Callable[[random.Random, Any, Sequence[str]], None]] = [
    *(
        _replace,
        _replace,
        _replace,
        _replace_number,
        _replace_number,
        _delete,
        _rename,
        _add,
        _swap,
        _graft,
        _nest,
        _refer,
    )
]


def _truncate(rng: random.Random, text: str) -> str:
    return text[: rng.randrange(len(text) + 1)]


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return (
        text[:at]
        + rng.choice(
            [
                "\t",
                "\x07",
                "\ud800",
                "{",
                "]",
                "&a ",
                "*a",
                "!!str ",
                "\n",
                ":",
                "'",
                "%",
                "---\n",
                "\r",
                "@",
                "#",
                "<<: 3\n",
            ]
        )
        + text[at:]
    )


def _duplicate_line(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    if lines:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "".join(lines)


def _retag(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if ": " in line]
    if places:
        at = rng.choice(places)
        lines[at] = (
            lines[at].partition(": ")[0]
            + ": "
            + rng.choice([*TAGS, "&a [*a]", "*a", "9" * 5000, "0x" + "f" * 99])
            + "\n"
        )
    return "".join(lines)


def _bomb(rng: random.Random, text: str) -> str:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]\n"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)]
    kind = rng.randrange(4)
    if kind == 0:
        return text + "".join(levels)
    if kind == 1:
        merges = ["m0: &m0 {x: 1, y: 2}\n"]
        merges += [f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, 9)]
        return text + "".join(merges)
    if kind == 2:
        names = [f"i{i}: ['${{i{i - 1}}}', '${{i{i - 1}}}', '${{i{i - 1}}}', '${{i{i - 1}}}']\n" for i in range(1, 12)]
        return text + "i0: x\n" + "".join(names)
    depth = rng.choice([40, 500, 5000])
    return text + "deep: " + "[" * depth + "]" * depth + "\n"


_TEXT: list[Callable[[random.Random, str], str]] = [_truncate, _insert, _insert, _duplicate_line, _retag, _retag, _bomb]


def _override(rng: random.Random, tree: Any) -> str:
    names: list[str] = []
    at = tree
    while isinstance(at, (dict, list)) and at and rng.random() < 0.8:
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        names.append(str(key))
        at = at[key]
    path = ".".join(names) or "x"
    path = rng.choice(
        [path] * 8
        + [path + ".0", path + ".x.y", path + "[99999999999]", path + "..a", "", path + "." * 50, path + ".²"]
    )
    value = _value(rng)
    text = (
        rng.choice([str(value)[:6000], *TAGS, "&a [*a]", "[1", "{a: 1, a: 2}", "", "9" * 5000, "[" * 500])
        if type(value) is not int or abs(value) < 10**300
        else "9" * 5000
    )
    return rng.choice([f"{path}={text}"] * 9 + [path, "=", f"{path} {text}"])
