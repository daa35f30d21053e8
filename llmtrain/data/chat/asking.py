"""Conversations as prompts of a model that was trained on its chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from llmtrain.data.chat.template import find_template
from llmtrain.data.tokenize.tokenizer import TextTokenizer


class ChatPrompts:
    """Conversations of one tokenizer and template. setting: as of `find_template`, which raises ChatError where there is none."""

    def __init__(self, tokenizer: TextTokenizer, setting: str | None = None) -> None:
        self.template = find_template(tokenizer, setting)
        self._spelled = Tokenizer.from_str(tokenizer.backend.to_str())  # what spells a special token is one

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids up to where the model's answer begins. Raises ChatError for a conversation that the template refuses."""
        text, _ = self.template.render(messages, add_generation_prompt=True)
        return self._spelled.encode(text, add_special_tokens=False).ids
