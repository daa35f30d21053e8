"""Bodies of OpenAI's /v1/completions and /v1/chat/completions: what they ask for, and what is wrong with them."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from llmtrain.config.base import Problem, Section
from llmtrain.config.decode import decode
from llmtrain.config.regular_file import parse_json
from llmtrain.config.report import format_value
from llmtrain.errors import UserError
from llmtrain.generate.options import Sampling

MOST_CHOICES, MOST_STOPS, MOST_TOP = 128, 16, 20
"""Largest numbers of answers to a body, of stop strings, and of likeliest tokens beside each."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (False, True),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
"""Keys of OpenAI's that are taken where they ask for nothing, at null or these values."""
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
"""Keys of OpenAI's that change no answer."""

Count = Annotated[int, Field(ge=1)]


class StreamOptions(Section):
    """Options of a stream. include_usage: a last chunk counts the tokens."""

    include_usage: bool = False


class Body(Section):
    """Settings that both kinds of bodies have. Null is a key's default, as OpenAI's clients write it."""

    model: str = ""
    max_tokens: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stop: Any = []
    """A text, or a list of texts."""
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def problems(self) -> Iterator[Problem]:
        known = isinstance(self.stops, list) and all(isinstance(one, str) and one for one in self.stops)
        if not known or len(self.stops) > MOST_STOPS:
            yield Problem("stop", None, f"expected at most {MOST_STOPS} texts, none of them empty")
        try:
            self.sampling(self.seed or 0)
        except UserError as error:
            yield Problem(str(error).split(" = ")[0], None, str(error).split(": ", 1)[1])

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def top(self) -> int | None:
        """Number of likeliest tokens to report with each; None: no log-likelihoods."""
        raise NotImplementedError

    def sampling(self, seed: int) -> Sampling:
        """Sampling options. seed: where the body has none."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k > 0 else None,
            top_p=self.top_p if self.top_p != 1 else None,
            repetition_penalty=self.repetition_penalty,
            seed=seed if self.seed is None else self.seed,
        )


class CompletionBody(Body):
    """A body of /v1/completions."""

    prompt: Any = None
    """A text, a list of texts, token ids, or a list of lists of them."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    return_tokens_as_token_ids: bool = False
    """vLLM's: tokens of log-probabilities are named `token_id:N` rather than by their texts."""

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        known = isinstance(self.prompt, (str, list))
        if not known or not all(isinstance(one, str) or _is_ids(one) for one in self.prompts):
            yield Problem("prompt", None, "expected a text, a list of texts, token ids, or a list of lists of them")
        elif not 0 < len(self.prompts) * self.n <= MOST_CHOICES:
            yield Problem(
                "prompt", None, f"expected 1 to {MOST_CHOICES} answers, found {len(self.prompts)} prompts times n"
            )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class ChatBody(Body):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] = 0
    tools: list[dict[str, Any]] | None = None

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            yield Problem("max_tokens", self.max_tokens, "is given beside max_completion_tokens; leave one of them out")
        if self.top_logprobs and not self.logprobs:
            yield Problem("top_logprobs", self.top_logprobs, "needs logprobs: true")


def read_body(kind: type[Body], raw: bytes) -> Any:
    """The settings of a body. Raises UserError with all that is wrong with it."""
    try:
        data = parse_json(raw)
        if not isinstance(data, dict):
            raise UserError("it is no object")
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise UserError("the body is no JSON: it is not UTF-8") from None
    except UnicodeEncodeError:
        raise UserError("the body has half of a surrogate pair in a text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON object: {error}") from None
    if isinstance(options := data.get("stream_options"), dict):
        data["stream_options"] = {key: value for key, value in options.items() if value is not None}
    data = {key: value for key, value in data.items() if value is not None and key not in _IGNORED}
    others = [key for key in data if key in _NEUTRAL and key not in kind.model_fields]
    found = [
        f"{key} = {format_value(value)}: not supported here; leave it out"
        for key in others
        if (value := data.pop(key)) not in _NEUTRAL[key]
    ]
    body, problems = decode(kind, data)
    found += [f"{problem.path}: {problem.message}" if problem.path else problem.message for problem in problems]
    if found:
        raise UserError("; ".join(found))
    return body
