"""YAML text as nodes, within limits under which no text can exhaust time, memory or the stack. No torch here."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

MAX_TEXT = 1 << 18
"""Characters of a file, and of all that interpolations make."""
MAX_VALUES = 10_000
"""Keys and values of a file, each alias counted as what it stands for."""
MAX_DEPTH = 32
"""Mappings and lists inside one another."""
MAX_STRING = 1 << 15
"""Characters of one value."""
MAX_KEY = 200
"""Characters of a key."""
INTEGER_BITS = 63

_TAG = "tag:yaml.org,2002:"


class Loader(yaml.SafeLoader):
    """Scalars follow YAML 1.2, as editors read it: `on` and `yes` are text, 010 is not octal, 1e-4 is a number.

    An alias yields a copy. Raises yaml.MarkedYAMLError for text beyond the limits above, for an alias to a value that
    contains it, and for a tag of anything but plain data.
    """

    yaml_implicit_resolvers: dict = {}

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._values = 0
        self._extent: dict[int, tuple[int, int]] = {}  # id of a finished node -> (values in it, depth)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        start = event.start_mark
        self._require(self._depth < MAX_DEPTH, f"more than {MAX_DEPTH} mappings and lists inside one another", start)
        before, self._depth, self._values = self._values, self._depth + 1, self._values + 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            self._require(id(node) in self._extent, "an alias (*) to a value that contains it", start)
            self._values += self._extent[id(node)][0]
        else:
            self._check_tag(event.tag, node)
            below = [self._extent[id(child)][1] for child in children(node)]
            self._extent[id(node)] = (self._values - before, 1 + max(below, default=0))
        deepest = self._depth + self._extent[id(node)][1]
        self._require(deepest <= MAX_DEPTH, f"more than {MAX_DEPTH} mappings and lists inside one another", start)
        self._require(self._values <= MAX_VALUES, f"more than {MAX_VALUES} values, aliases (*) included", start)
        return node

    def _check_tag(self, tag: str | None, node: Any) -> None:
        """A tag may say only what the value is without it, or that it is text."""
        if tag in (None, "!"):
            return
        plain = self.resolve(type(node), node.value, (True, False))
        text = isinstance(node, yaml.ScalarNode) and tag == _TAG + "str"
        shown = (tag or "").replace(_TAG, "!!")
        self._require(text or tag == plain, f"the tag {shown} is not one for this value", node.start_mark)

    def _require(self, condition: bool, problem: str, mark: Any) -> None:
        if not condition:
            raise yaml.MarkedYAMLError(None, None, problem, mark)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value = super().construct_object(node, deep=True)
        # Forgotten at once, so that an alias is constructed anew: an override of one must not change the other.
        self.constructed_objects.pop(node, None)
        return value

    def construct_yaml_int(self, node: Any) -> int:
        return read_integer(node.value) or 0  # a longer one is reported by scalar_problem

    def construct_yaml_str(self, node: Any) -> str:
        return "" if text_problem(node.value) else node.value  # likewise


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), list(_first))
Loader.add_constructor(_TAG + "int", Loader.construct_yaml_int)
Loader.add_constructor(_TAG + "str", Loader.construct_yaml_str)


def check_extent(events: Iterable[Any], max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH) -> None:
    """Check what a text stands for by its events, before any of it is built: libyaml nests calls as the text nests values.

    Each alias counts as what it stands for. Raises yaml.MarkedYAMLError beyond these limits, and for an alias to a value that
    contains it.
    """
    values, anchored, within = 0, dict[str, tuple[int, int]](), list[list[Any]]()
    for event in events:
        deepest = len(within)
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, *_ in within):
                raise yaml.MarkedYAMLError(None, None, "an alias (*) to a value that contains it", event.start_mark)
            count, depth = anchored.get(event.anchor, (1, 0))
            values, deepest = values + count, deepest + depth
        elif isinstance(event, yaml.NodeEvent):
            values, deepest = values + 1, deepest + isinstance(event, yaml.CollectionStartEvent)
            within.append([event.anchor, values, deepest])
        if isinstance(event, (yaml.ScalarEvent, yaml.CollectionEndEvent)):
            anchor, before, deepest = within.pop()
            if anchor is not None:
                anchored[anchor] = (values - before + 1, deepest - len(within))
        if within:
            within[-1][2] = max(within[-1][2], deepest)
        if deepest > max_depth or values > max_values:
            most = (
                f"{max_depth} mappings and lists inside one another"
                if deepest > max_depth
                else f"{max_values:,} values"
            )
            raise yaml.MarkedYAMLError(None, None, f"more than {most}, aliases (*) included", event.start_mark)


def children(node: yaml.Node) -> Iterator[yaml.Node]:
    """Keys and values of a mapping, items of a list."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def read_integer(text: str) -> int | None:
    """The integer that a scalar spells; None beyond 63 bits and a sign."""
    digits = text.replace("_", "")
    if len(digits) > INTEGER_BITS:
        return None
    value = int(digits, 16 if digits.startswith("0x") else 10)
    return value if abs(value) < 1 << INTEGER_BITS else None


def scalar_problem(node: yaml.ScalarNode) -> str | None:
    """Reason why a scalar can be no setting, whatever the setting; None for the others."""
    if node.tag == _TAG + "int" and read_integer(node.value) is None:
        return f"an integer lies below 2^{INTEGER_BITS}"
    return text_problem(node.value)


def text_problem(text: str) -> str | None:
    """Reason why a text can be no setting, whatever the setting; None for the others."""
    if len(text) > MAX_STRING:
        return f"has {len(text)} characters; at most {MAX_STRING} are allowed"
    if bad := re.search("[\x00\ud800-\udfff]", text):
        return f"has the character {bad[0]!r} at position {bad.start() + 1}, which is not text"
    return None


def is_merge(key: yaml.ScalarNode) -> bool:
    """True for the key `<<`, whose value's entries are added to the mapping."""
    return key.tag == _TAG + "merge"


def make_text(key: yaml.ScalarNode) -> None:
    """Makes a key the text as it is written, whatever it spells."""
    key.tag = _TAG + "str"


def syntax(error: yaml.MarkedYAMLError) -> str:
    """`line 3, column 5: ...`"""
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + syntax_reason(error)


def syntax_reason(error: yaml.MarkedYAMLError) -> str:
    """The error without its place."""
    hint = "; indent with spaces, not tabs" if "'\\t'" in (error.problem or "") else ""
    since = (
        f" {error.context} that starts on line {error.context_mark.line + 1}"
        if error.context and error.context_mark
        else ""
    )
    return f"{error.problem}{since}{hint}"
