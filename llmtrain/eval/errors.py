"""The one error of tasks and documents that speaks to the user."""

from __future__ import annotations

from llmtrain.errors import UserError


class EvalError(UserError):
    """A task, document or tokenizer that cannot be evaluated; says where, what was found and what to do."""
