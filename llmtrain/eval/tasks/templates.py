"""Jinja templates that make the parts of a document from a record's fields.

The language is lm-evaluation-harness's, so that its tasks carry over: `"Question: {{question}}\\nAnswer:"`. A template
that is one expression and nothing else, `"{{choices.text}}"`, keeps the value's type: a list stays a list. Templates
are sandboxed: a task file from an untrusted source cannot reach the machine.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from types import GeneratorType
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from llmtrain.eval.errors import DOCUMENT_CHARACTERS, DOCUMENT_SECONDS, EvalError, LimitExceeded, time_limit

_ONE_EXPRESSION = re.compile(r"\{\{-?((?:(?!\{\{|\}\}).)*?)-?\}\}", re.DOTALL)
_UNDEFINED = re.compile(r"'([^']*)' is undefined")


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise TemplateError("a value in it is null")
    return value


def _regex_replace(text: str, pattern: str, replacement: str = "") -> str:
    """`text | regex_replace(' +', ' ')`. As everywhere in Jinja, a backslash in a quoted text is written twice."""
    return re.sub(pattern, replacement, text)


def _regex_groups(text: str, pattern: str) -> list[str]:
    """`text | regex_groups('(.*)\\n(.*)')`: groups of a pattern that must match the whole text; `.` is any character."""
    match = re.fullmatch(pattern, text, re.DOTALL)
    if match is None:
        raise TemplateError(f"regex_groups: {pattern!r} does not match {_short(text)}")
    return list(match.groups())


def _regex_findall(text: str, pattern: str) -> list[Any]:
    """`text | regex_findall('\\d+')`: all matches; of a pattern with a group, what it matched."""
    return re.findall(pattern, text)


def _require_length(length: int) -> None:
    if length > DOCUMENT_CHARACTERS:
        raise LimitExceeded(
            f"it would make {length:,} characters of one document, where {DOCUMENT_CHARACTERS:,} is the most"
        )


class _Bounded(SandboxedEnvironment):
    """A sandbox in which no text or list is repeated beyond DOCUMENT_CHARACTERS: Python would allocate all of it first."""

    intercepted_binops = frozenset({"*"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                _require_length(len(value) * times)
        return super().call_binop(context, operator, left, right)


class _Own(_Bounded, ImmutableSandboxedEnvironment):
    """A sandbox of our own tasks' templates."""


def _environment() -> _Own:
    # A final newline belongs to the prompt, and a field that is not there must never become an empty text.
    # Not optimized: a constant such as 9**9**9 would be computed when the task is read.
    made = _Own(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, finalize=_refuse_null, optimized=False
    )
    made.filters["regex_replace"] = _regex_replace
    made.filters["regex_groups"] = _regex_groups
    made.filters["regex_findall"] = _regex_findall
    return made


_ENVIRONMENT = _environment()


class Template:
    """Compiled template. Raises EvalError for a syntax error."""

    def __init__(self, source: str):
        self.source = source
        try:
            one = _ONE_EXPRESSION.fullmatch(source)
            if one:
                self._evaluate = _ENVIRONMENT.compile_expression(one[1].strip(), undefined_to_none=False)
            else:
                self._evaluate = _ENVIRONMENT.from_string(source).render
        except TemplateSyntaxError as error:
            raise EvalError(f"not a template: {error.message}") from None
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # of Python, which compiles it
            raise EvalError(f"not a template that Python can compile: {error}") from None

    def value(self, names: Mapping[str, Any]) -> Any:
        """Value of the expression, or the rendered text. Raises EvalError with the missing field or the reason."""
        try:
            with time_limit(DOCUMENT_SECONDS, "it"):
                value = self._evaluate(names)
                if isinstance(value, GeneratorType):  # what filters such as `map` give
                    value = list(value)
            if isinstance(value, str):
                _require_length(len(value))
            if isinstance(value, Undefined):
                str(value)  # raises with the name
            return value
        except LimitExceeded as error:
            raise LimitExceeded(f"{error}, in the template {_short(self.source)}") from None
        except Exception as error:  # a template may fail like any program: sort of TypeError, IndexError, ...
            raise EvalError(f"{self._reason(error, names)}, in the template {_short(self.source)}") from None

    def text(self, names: Mapping[str, Any]) -> str:
        """Value as text; numbers are converted. Raises EvalError for other types."""
        value = self.value(names)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not isinstance(value, str):
            raise EvalError(f"expected text from the template {_short(self.source)}, found {_kind(value)}")
        return str(value)

    def _reason(self, error: Exception, names: Mapping[str, Any]) -> str:
        missing = _UNDEFINED.fullmatch(str(error))
        if missing:
            known = ", ".join(f"`{name}`" for name in names if name != "record")
            return f"field `{missing[1]}` is missing (there are: {known or 'none'})"
        return str(error) or type(error).__name__


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def _harness_environment() -> _Bounded:
    """lm-evaluation-harness' environment, in the sandbox. lm_eval's own is plain: a template reaches Python's internals there, and
    so may do whatever a program may. As there, null is the text None, and lists may be changed."""
    made = _Bounded(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, optimized=False)
    made.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(pattern, new, text, count=count)
    return made


_HARNESS = _harness_environment()


@cache
def compiled(template: str) -> Any:
    """A template of lm-evaluation-harness, which lm_eval compiles anew for every document."""
    return _HARNESS.from_string(template)


def render(template: str, record: Mapping[str, Any]) -> str:
    """Text of a template for a record, as of `lm_eval.utils.apply_template`. Raises EvalError for one that takes too long."""
    with time_limit(DOCUMENT_SECONDS, "a template"):
        text = compiled(template).render(record)
    _require_length(len(text))
    return text
