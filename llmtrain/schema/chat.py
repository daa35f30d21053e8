"""The section `data.prepare.chat`: conversations in place of texts. No torch here."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Problem, Section
from llmtrain.config.report import nearest
from llmtrain.config.texts import PathText

_FIELDS = (
    *(
        "messages",
        "prompt",
        "completion",
        "response",
        "label",
        "chosen",
        "rejected",
        "conversations",
        "instruction",
        "output",
    ),
    *("input", "history", "system", "tools"),
)
"""Fields of all formats, and of what may stand beside them."""


class ChatSection(Section):
    """Conversations, or prompts and their completions, in place of texts: how records become tokens of which some are trained."""

    format: Literal["messages", "completion", "sharegpt", "alpaca", "pairs", "labels"] | None = None
    """messages: OpenAI's, with `role` and `content`; completion: `prompt` and `completion` or `response`; sharegpt: `conversations`
    with `from` and `value`; alpaca: `instruction`, `input`, `output`. For `objective: preference`, pairs: `chosen` and `rejected`,
    with `prompt` or what both begin with; labels: `prompt`, `completion` or `response`, `label`. Default: by the first
    record's fields."""
    fields: dict[str, str] = {}
    """Names of fields in the records in place of the format's: {prompt: question, completion: answer}."""
    template: PathText | None = None
    """A file of Jinja, `chatml`, or `tokenizer` for the tokenizer's own. Default: the tokenizer's own; of prompts and completions
    that are texts, and of pairs and labels that are, none."""
    targets: Literal["last", "all"] = "all"
    """Answers that are trained: the last of each conversation, or all."""
    prompts: Annotated[str, Field(pattern=r"^(none|all|length>=\d{1,9})$")] = "none"
    """Prompts that are trained as well: none, all, or `length>=N`, those of N tokens or more."""

    def problems(self) -> Iterator[Problem]:
        for name in self.fields:
            if name not in _FIELDS:
                near = nearest(name, dict.fromkeys(_FIELDS))
                hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_FIELDS)}"
                yield Problem("fields", None, f"{name} is no field of a format; {hint}")
