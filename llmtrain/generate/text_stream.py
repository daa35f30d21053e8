"""Text of tokens as they come. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmtrain.data.tokenize.tokenizer import TextTokenizer

CONTEXT_TOKENS = 6
"""Prompt tokens decoded along with the first new ones: some tokenizers write a word differently at the start of a text."""


@dataclass
class TextStream:
    """Incremental detokenizer. Text that may still become part of a character or of a stop string is withheld."""

    tokenizer: TextTokenizer
    context: list[int]
    stops: Sequence[str] = ()
    _ids: list[int] = field(default_factory=list)
    _start: int = 0
    _read: int = 0
    _held: str = ""
    stopped: bool = False

    def __post_init__(self) -> None:
        self._ids = list(self.context)
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """Add a token and return the text that is now certain. After a stop string `stopped` is set and no text follows."""
        self._ids.append(token)
        if token in self.tokenizer.byte_ids:  # the next byte may make the bytes before it no text either
            return ""
        before = self.tokenizer.decode(self._ids[self._start : self._read])
        now = self.tokenizer.decode(self._ids[self._start :])
        if now.endswith("\ufffd"):  # the bytes so far end within a character
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """Return the withheld text."""
        if self.stopped:
            return ""
        before = self.tokenizer.decode(self._ids[self._start : self._read])
        rest = self.tokenizer.decode(self._ids[self._start :])[len(before) :]
        return self._release(rest, last=True)

    def _release(self, new: str, last: bool = False) -> str:
        text = self._held + new
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
