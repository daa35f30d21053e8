"""Chat templates: those of a tokenizer, of a Jinja file, or `chatml`, rendered by transformers in its sandbox.

template = find_template(tokenizer, None)
text, answers = template.render(messages)      # answers: (begin, end) characters of what `{% generation %}` encloses
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from llmtrain.config.limits import DOCUMENT_SECONDS, time_limit
from llmtrain.config.regular_file import read_text
from llmtrain.data.tokenize.tokenizer import CHAT_TEMPLATE, EOD, TextTokenizer, token_text
from llmtrain.errors import UserError

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""The template `chatml`, with its answers marked."""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class ChatError(UserError):
    """A chat template that is missing, or fails."""


class TemplateRefusal(ChatError):
    """A conversation that the template refuses, or that its code fails on. reason: why, and the template's line."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"chat template {source}: {reason}")
        self.reason = reason


class ChatTemplate:
    """A template's Jinja text. special_tokens: texts by the names under which the template finds them. source: its file, for
    messages. digest: of the text."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        self.text, self.special_tokens, self.source = text, dict(special_tokens), source
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._reads: dict[str, bool] = {}

    @property
    def marks_answers(self) -> bool:
        """True if `{% generation %}` encloses what the model writes."""
        return _GENERATION.search(self.text) is not None

    def reads(self, name: str) -> bool:
        """True if the template has this name of a variable or field."""
        if name not in self._reads:
            self._reads[name] = re.search(rf"\b{name}\b", self.text) is not None
        return self._reads[name]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, answers): the conversation as text, and the characters that `{% generation %}` encloses, [begin, end) of each.

        add_generation_prompt: end where the model's answer begins. continue_final_message: the last turn is the beginning of the
        answer. Raises TemplateRefusal for a conversation that the template refuses; ChatError for one that takes longer than
        DOCUMENT_SECONDS, or makes the template fail otherwise.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        found: Any = None
        tracked = self.marks_answers and not continue_final_message
        try:
            with time_limit(DOCUMENT_SECONDS, f"chat template {self.source}", ChatError):
                found = render_jinja_template(
                    conversations=[[{k: v for k, v in one.items() if v is not None} for one in messages]],
                    tools=None if tools is None else list(tools),
                    chat_template=self.text,
                    return_assistant_tokens_mask=tracked,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **self.special_tokens,  # type: ignore[arg-type]
                )
        except ChatError:
            raise
        except TemplateError as error:
            raise TemplateRefusal(self.source, _reason(error)) from None
        except Exception as error:  # a template may fail like any program
            raise ChatError(f"chat template {self.source}: {_reason(error)}") from None
        texts, answers = found
        return texts[0], [tuple(one) for one in answers[0]] if tracked else []


def _reason(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    return f"{str(error) or type(error).__name__}" + (f" (line {line})" if line else "")


def find_template(tokenizer: TextTokenizer | None, setting: str | None) -> ChatTemplate:
    """Template of a setting: null, the tokenizer's own; `chatml`; else the file of that path. tokenizer: None for one
    that is trained here.

    Raises ChatError when there is none, or the file cannot be read.
    """
    special = {"eos_token": EOD} if tokenizer is None else _special_tokens(tokenizer)
    if setting is None and tokenizer is None:
        raise ChatError("chat_template: a tokenizer that is trained here has none; give the path of a Jinja file")
    if setting is None:
        assert tokenizer is not None
        return ChatTemplate(special_tokens=special, **own_template(tokenizer))
    if setting == "chatml":
        return ChatTemplate(CHATML, special, "chatml")
    path = Path(setting).expanduser()
    try:
        return ChatTemplate(read_text(path), special, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ChatError(f"chat_template: {path} cannot be read: {error}") from None


def own_template(tokenizer: TextTokenizer) -> dict[str, str]:
    """`text` and `source` (its file) of the tokenizer's template. Raises ChatError where it has none."""
    folder = tokenizer.folder or Path(".")
    if tokenizer.chat_template is not None:
        return {"text": tokenizer.chat_template, "source": str(folder / CHAT_TEMPLATE)}
    file = folder / "tokenizer_config.json"
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    if isinstance(found, dict):
        if "default" not in found:
            names = ", ".join(sorted(map(str, found)))
            raise ChatError(
                f"chat_template: {file} has several ({names}), none of them named default; write one to a file and give its path"
            )
        found = found["default"]
    if not isinstance(found, str):
        raise ChatError(
            f"chat_template: the tokenizer has none: {file} has no `chat_template`, and {CHAT_TEMPLATE} is not beside it; "
            "give the path of a Jinja file"
        )
    return {"text": found, "source": f"of {file}"}


def _special_tokens(tokenizer: TextTokenizer) -> dict[str, str]:
    """Special tokens by the names under which templates find them."""
    found = {name: tokenizer.config.get(name) for name in _SPECIAL_TOKENS}
    extra = tokenizer.config.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    texts = {name: token_text(token) or "" for name, token in found.items() if token is not None}
    return {"eos_token": tokenizer.eod_token} | texts


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
