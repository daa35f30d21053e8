"""Error of tasks, documents and models under evaluation."""

from __future__ import annotations

from llmtrain.errors import UserError


class EvalError(UserError):
    """A task, document, model or tokenizer that cannot be used; the message has its location, the finding and a remedy."""
