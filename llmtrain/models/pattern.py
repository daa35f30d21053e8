"""The layer pattern: one line that shows the stack.

    pattern := item+          item := unit ['*' COUNT]
    unit    := NAME | NAME '+' NAME | '(' pattern ')'

`m*6 (s+m m*5)*7` is six layers of block m, then seven times: one m fed by shared block s, five m.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.errors import UserError

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<count>[0-9]+)|(?P<sign>[()*+]))")
MAX_LAYERS = 10_000
_MAX_DEPTH = 20
"""Groups inside one another."""


class PatternError(UserError):
    """The pattern cannot be read; the message says where."""


@dataclass(frozen=True)
class Layer:
    """One layer: a named block, and the shared block that feeds it, if any."""

    block: str
    shared: str | None = None


def parse_pattern(text: str) -> list[Layer]:
    """Expands a layer pattern. Raises PatternError with the position of what is wrong."""
    tokens = _tokenize(text)
    layers, end = _sequence(tokens, 0, depth=0)
    if end != len(tokens):
        raise PatternError(f"unexpected '{tokens[end][1]}' at character {tokens[end][2] + 1}")
    if not layers:
        raise PatternError("the pattern is empty; name at least one block, for example 'm*6'")
    return layers


def format_pattern(layers: Sequence[Layer]) -> str:
    """A short way to write a stack; parse_pattern gives the same layers back.

    Runs become `x*3`, and two runs that take turns `(x y*5)*7`.
    """
    runs = [(layer, len(list(group))) for layer, group in itertools.groupby(layers)]
    parts, at = [], 0
    while at < len(runs):
        pair, times = runs[at : at + 2], 1
        while len(pair) == 2 and runs[at + 2 * times : at + 2 * times + 2] == pair:
            times += 1
        if times > 1:
            parts.append(f"({' '.join(map(_format_run, pair))})*{times}")
            at += 2 * times
        else:
            parts.append(_format_run(runs[at]))
            at += 1
    return " ".join(parts)


def _format_run(run: tuple[Layer, int]) -> str:
    layer, count = run
    name = f"{layer.shared}+{layer.block}" if layer.shared else layer.block
    return name if count == 1 else f"{name}*{count}"


def _tokenize(text: str) -> list[tuple[str, str, int]]:
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise PatternError(
                f"unexpected '{text[at]}' at character {at + 1}; a pattern has block names, *, +, ( and )"
            )
        kind = match.lastgroup
        assert kind is not None
        tokens.append((kind, match[kind], match.start(kind)))
        at = match.end()
    return tokens


def _sequence(tokens: list[tuple[str, str, int]], at: int, depth: int) -> tuple[list[Layer], int]:
    layers: list[Layer] = []
    while at < len(tokens) and tokens[at][1] != ")":
        kind, value, start = tokens[at]
        if value == "(":
            if depth == _MAX_DEPTH:
                raise PatternError(f"more than {_MAX_DEPTH} groups inside one another at character {start + 1}")
            unit, at = _sequence(tokens, at + 1, depth + 1)
            if at >= len(tokens):
                raise PatternError(f"the '(' at character {start + 1} is never closed")
            if not unit:
                raise PatternError(f"the group at character {start + 1} is empty")
            at += 1
        elif kind == "name":
            at += 1
            unit = [Layer(value)]
            if at < len(tokens) and tokens[at][1] == "+":
                if at + 1 >= len(tokens) or tokens[at + 1][0] != "name":
                    raise PatternError(f"'{value}+' at character {start + 1} needs a block name after the '+'")
                unit = [Layer(tokens[at + 1][1], shared=value)]
                at += 2
        else:
            raise PatternError(f"unexpected '{value}' at character {start + 1}")
        if at < len(tokens) and tokens[at][1] == "*":
            count = tokens[at + 1][1].lstrip("0") if at + 1 < len(tokens) and tokens[at + 1][0] == "count" else ""
            if not count:
                raise PatternError(f"the '*' at character {tokens[at][2] + 1} needs a positive number after it")
            if len(count) > 6 or len(unit) * int(count) > MAX_LAYERS:
                raise PatternError(f"more than {MAX_LAYERS} layers")
            unit = unit * int(count)
            at += 2
        layers += unit
        if len(layers) > MAX_LAYERS:
            raise PatternError(f"more than {MAX_LAYERS} layers")
    if depth == 0 and at < len(tokens):
        raise PatternError(f"the ')' at character {tokens[at][2] + 1} was never opened")
    return layers, at
