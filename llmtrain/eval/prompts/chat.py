"""Prompts as turns of a conversation, in plain text or in a model's chat template, as lm-evaluation-harness 0.4.13 writes them.

style = PromptStyle(chat_template(tokenizer, True), "Answer briefly.")
turns = [*style.system_turns(preamble), *question_turns("1 + 1 =", "2"), *question_turns("2 + 2 =")]
text = style.prompt(turns)          # ends where the model's answer begins
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmtrain.data.chat import template as chat
from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError
from llmtrain.logs import log

_QUESTION = "1 + 1 = ?"


@dataclass(frozen=True)
class Turn:
    """One message. delimiter: text behind it where several become one plain text."""

    role: Literal["system", "user", "assistant"]
    content: str
    delimiter: str = ""


def question_turns(
    question: str, answer: str | None = None, *, delimiter: str = " ", example_delimiter: str = ""
) -> list[Turn]:
    """Turns of a question and its answer, which may be empty, or of a question alone (None).

    delimiter: between question and answer (target_delimiter). example_delimiter: behind the answer (fewshot_delimiter).
    """
    if answer is None:
        return [Turn("user", question)]
    return [Turn("user", question, delimiter), Turn("assistant", answer, example_delimiter)]


class ChatTemplate:
    """Chat template for prompts. takes_system: False once it has refused a system turn.

    Raises EvalError, which names `source`, for one that does not render a user's turn.
    """

    def __init__(self, template: chat.ChatTemplate):
        self.template, self.text, self.source, self.digest = template, template.text, template.source, template.digest
        self.takes_system = True
        if _QUESTION not in self.render([{"role": "user", "content": _QUESTION}]):
            raise EvalError(f"chat template {self.source}: what it makes of a question does not contain the question")

    def render(self, messages: Sequence[Mapping[str, str]], *, continue_final_message: bool = False) -> str:
        """Text of a conversation (role and content of each turn), up to where the model's answer begins.

        continue_final_message: the last turn is the beginning of the answer. A template that refuses the conversation is given
        it without its system turn, as lm-evaluation-harness does; a warning says so once. Raises EvalError with the reason.
        """
        begun = continue_final_message
        try:
            return self.template.render(messages, add_generation_prompt=not begun, continue_final_message=begun)[0]
        except chat.TemplateRefusal as error:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise EvalError(str(error)) from None
            rendered = self.render(others, continue_final_message=continue_final_message)
            if self.takes_system:
                self.takes_system = False
                log.warning(f"{error}; prompts go without their system turn")
            return rendered
        except chat.ChatError as error:
            raise EvalError(str(error)) from None


def chat_template(tokenizer: TextTokenizer, setting: bool | str) -> ChatTemplate | None:
    """Chat template of a setting `chat_template`: true, the tokenizer's own; a text, the file of that path; false, none.

    Raises EvalError when there is none, or the file cannot be read.
    """
    if setting is False:
        return None
    try:
        found = chat.find_template(tokenizer, None if setting is True else setting)
    except chat.ChatError as error:
        raise EvalError(str(error)) from None
    return ChatTemplate(found)


@dataclass(frozen=True)
class PromptStyle:
    """Way in which turns become a prompt.

    template: None writes plain text. system: text before a task's own preamble. multiturn: few-shot examples are turns of their
    own; otherwise they stand in one user turn with the question.
    """

    template: ChatTemplate | None = None
    system: str = ""
    multiturn: bool = True

    def system_turns(self, preamble: str, example_delimiter: str = "\n\n") -> list[Turn]:
        """The system turn, if it has any text."""
        apart = self.system and preamble and not (self.system[-1].isspace() or preamble[0].isspace())
        text = self.system + (example_delimiter if apart else "") + preamble
        return [Turn("system", text)] if text else []

    def prompt(self, turns: Sequence[Turn]) -> str:
        """Text up to where the answer begins, of turns that end with the user's. Raises EvalError."""
        if self.template is None:
            return "".join(turn.content + turn.delimiter for turn in turns)
        if not self.multiturn:
            first = turns[0].role == "system"
            text = "".join(turn.content + turn.delimiter for turn in turns[first:-1]) + turns[-1].content
            turns = [*turns[:first], Turn("user", text)]
        return self.template.render([{"role": turn.role, "content": turn.content} for turn in turns])

    def delimiter(self, delimiter: str) -> str:
        """Text between the prompt and a choice: in a template none."""
        return delimiter if self.template is None else ""

    def as_json(self) -> dict[str, Any] | None:
        """Description for files of results; None for plain text without system text."""
        if self.template is None:
            return {"system_instruction": self.system} if self.system else None
        return {
            "chat_template": self.template.source,
            "chat_template_digest": self.template.digest,
            "system_instruction": self.system,
            "system_turn_refused": not self.template.takes_system,
            "fewshot_as_multiturn": self.multiturn,
        }


PLAIN = PromptStyle()
