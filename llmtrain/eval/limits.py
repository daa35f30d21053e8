"""Limits of time in evaluation, which end with an EvalError."""

import functools

from llmtrain.config import limits
from llmtrain.eval.errors import EvalError

DOCUMENT_SECONDS = limits.DOCUMENT_SECONDS
time_limit = functools.partial(limits.time_limit, error=EvalError)
