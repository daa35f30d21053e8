"""Templates of lm-evaluation-harness' tasks, in Jinja's sandbox and compiled once.

lm_eval renders them in a plain environment, in which a template reaches Python's internals and so may do whatever a program may,
and compiles each anew for every document. Here, a file without `!function` runs no code.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from llmtrain.eval.errors import DOCUMENT_SECONDS, time_limit


def _environment() -> SandboxedEnvironment:
    # As in the harness, null is the text None, and lists may be changed; a constant is not computed when it is read.
    made = SandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False, optimized=False
    )
    made.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(pattern, new, text, count=count)
    return made


_ENVIRONMENT = _environment()


@cache
def compiled(template: str) -> Any:
    return _ENVIRONMENT.from_string(template)


def render(template: str, record: Mapping[str, Any]) -> str:
    """Text of a template for a record, as of `lm_eval.utils.apply_template`. Raises EvalError for one that takes too long."""
    with time_limit(DOCUMENT_SECONDS, "a template"):
        return compiled(template).render(record)
