"""The section `data.prepare.chat`: conversations in place of texts. No torch here."""

from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Section
from llmtrain.config.texts import PathText


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
