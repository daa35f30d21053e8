"""Answers as OpenAI's API writes them, whole and as chunks of a stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.generate.request import Request, Token
from llmtrain.generate.text_stream import CONTEXT_TOKENS, TextStream


@dataclass(frozen=True)
class Piece:
    """Text that is certain after a token. tokens: those drawn since the last piece. end: of the last piece, "stop" or "length";
    "error" where the engine failed."""

    choice: int
    text: str
    tokens: tuple[Token, ...] = ()
    end: str | None = None


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each choice that has some: what has come while the last ones were being sent is sent together."""
    found: dict[int, Piece] = {}
    for piece in pieces:
        before = found.get(piece.choice)
        if before is not None:
            piece = Piece(piece.choice, before.text + piece.text, before.tokens + piece.tokens, piece.end)
        found[piece.choice] = piece
    return list(found.values())


@dataclass(eq=False)
class Answer:
    """One choice of a response. put: takes its pieces, in the engine's thread."""

    choice: int
    tokenizer: TextTokenizer
    prompt: Sequence[int]
    stops: Sequence[str]
    put: Callable[[Piece], None]
    _held: list[Token] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.tokenizer, list(self.prompt[-CONTEXT_TOKENS:]), self.stops)

    def take(self, token: Token) -> bool:
        """Add a token; True where a stop string ends the answer."""
        if token.end != "eod":
            self._held.append(token)
        text = "" if token.end == "eod" else self.stream.add(token.id)
        end = {"eod": "stop", "length": "length", None: None}[token.end]
        if end and not self.stream.stopped:
            text += self.stream.finish()
        end = "stop" if self.stream.stopped else end
        if text or end:
            self.put(Piece(self.choice, text, tuple(self._held), end))
            self._held = []
        return self.stream.stopped


class CompletionForm:
    """Responses of /v1/completions. top: None without log-likelihoods. as_ids: tokens are named by their ids."""

    name, prefix, object, chunk_object = "completion", "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: TextTokenizer, top: int | None, as_ids: bool = False):
        self.tokenizer, self.top, self.as_ids = tokenizer, top, as_ids

    def choice(
        self, number: int, text: str, tokens: Sequence[Token], end: str | None, offset: int = 0
    ) -> dict[str, Any]:
        """A whole choice, and what a chunk of it looks like too. offset: characters before."""
        return {"index": number, "text": text, "logprobs": self._logprobs(tokens, offset), "finish_reason": end}

    chunk = choice

    def opening(self, number: int) -> dict[str, Any] | None:
        """The chunk before a choice's first."""
        return None

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> dict[str, Any] | None:
        if self.top is None:
            return None
        texts = [self.tokenizer.decode([token.id]) for token in tokens]
        offsets = [offset + sum(map(len, texts[:at])) for at in range(len(texts))]
        # Several tokens may have one text, that of half a character: the likeliest of them stands.
        tops = [{self.tokenizer.decode([id]): value for id, value in reversed(token.top)} for token in tokens]
        return {
            "tokens": [f"token_id:{token.id}" for token in tokens] if self.as_ids else texts,
            "token_logprobs": [token.log_likelihood for token in tokens],
            "top_logprobs": tops if self.top else None,
            "text_offset": offsets,
        }


class ChatForm:
    """Responses of /v1/chat/completions. top: None without log-likelihoods."""

    name, prefix, object, chunk_object = "chat", "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer, top: int | None):
        self.tokenizer, self.top = tokenizer, top

    def choice(
        self, number: int, text: str, tokens: Sequence[Token], end: str | None, offset: int = 0
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": number, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": end}

    def chunk(
        self, number: int, text: str, tokens: Sequence[Token], end: str | None, offset: int = 0
    ) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": number, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": end}

    def opening(self, number: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.top is None:
            return None
        return {"content": [self._token(t.id, t.log_likelihood) | self._top(t) for t in tokens]}

    def _top(self, token: Token) -> dict[str, Any]:
        return {"top_logprobs": [self._token(id, value) for id, value in token.top]}

    def _token(self, id: int, value: float) -> dict[str, Any]:
        text = self.tokenizer.decode([id])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


Form = CompletionForm | ChatForm


def usage(requests: Sequence[Request]) -> dict[str, int]:
    """Numbers of tokens, each prompt counted once however many answers it has."""
    prompts = {id(request.prompt): len(request.prompt) for request in requests}
    read, drawn = sum(prompts.values()), sum(len(request.tokens) for request in requests)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
