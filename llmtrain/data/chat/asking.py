"""Conversations as prompts of a model that was trained on its chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from llmtrain.data.chat.template import ChatTemplate
from llmtrain.data.tokenize.tokenizer import TextTokenizer


class ChatPrompts:
    """Conversations of one tokenizer and template."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        self.template = template
        self._spelled = Tokenizer.from_str(tokenizer.backend.to_str())  # what spells a special token is one

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """The conversation up to where the model's answer begins; where the last turn is the assistant's, up to the end of that
        beginning of an answer. Raises ChatError for one that the template refuses."""
        begun = messages[-1]["role"] == "assistant"
        return self.template.render(
            messages, tools=tools, add_generation_prompt=not begun, continue_final_message=begun
        )[0]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text of this template."""
        return self._spelled.encode(text, add_special_tokens=False).ids
