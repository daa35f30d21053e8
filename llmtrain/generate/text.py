"""Continuation of text prompts, streamed as it is decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.generate.decoding import decode
from llmtrain.generate.sampling import Sampling
from llmtrain.generate.text_stream import CONTEXT_TOKENS, TextStream
from llmtrain.models.causal_lm import CausalLM


@dataclass(frozen=True)
class TextChunk:
    """Further text of one row. end: for the row's last chunk, the reason: a stop string, a token that ends texts, or length."""

    row: int
    text: str
    end: Literal["stop", "eod", "length"] | None = None


def complete(
    model: CausalLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[str | list[int]],
    options: Sampling = Sampling(),  # noqa: B008 (frozen)
    *,
    max_new_tokens: int,
    stops: Sequence[str] = (),
    row_numbers: Sequence[int] | None = None,
) -> Iterator[TextChunk]:
    """Continue a batch of prompts; chunks come as they are decoded, one with an `end` for every row.

    Neither a token that ends texts nor a stop string is part of the text. An empty prompt starts a document; one of ids is taken as
    it is.
    """
    ids = [tokenizer.prompt_ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    ends = set(tokenizer.end_ids)
    streams = [TextStream(tokenizer, row[-CONTEXT_TOKENS:], stops) for row in ids]
    chunks: list[TextChunk] = []

    def take(row: int, token: int) -> bool:
        stream = streams[row]
        if token in ends:
            chunks.append(TextChunk(row, stream.finish(), "eod"))
            return True
        text = stream.add(token)
        if text or stream.stopped:
            chunks.append(TextChunk(row, text, "stop" if stream.stopped else None))
        return stream.stopped

    ended = set()
    for _ in decode(model, ids, options, max_new_tokens=max_new_tokens, stop=take, row_numbers=row_numbers):
        ended |= {chunk.row for chunk in chunks if chunk.end}
        yield from chunks
        chunks.clear()
    for row in sorted(set(range(len(prompts))) - ended):
        text = streams[row].finish()
        yield TextChunk(row, text, "stop" if streams[row].stopped else "length")
