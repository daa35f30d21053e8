"""The perplexity of a text longer than the window: each token is scored once, after as much context as fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.scoring.request import Score
from llmtrain.eval.tasks.documents import Document, Text


def rolling_requests(documents: Sequence[Document], tokenizer: PromptTokenizer, max_seq_len: int) -> Iterator[Score]:
    """One request per window, numbered within its document; the model reads at most max_seq_len tokens for each.

    As lm-evaluation-harness: the first token follows BOS (EOS for want of one), later windows follow on one another,
    and the last one reaches back so far that it is full.
    """
    for document in documents:
        assert isinstance(document.content, Text)
        ids = tokenizer.special(document.content.text)
        if not ids:
            raise EvalError(f"{document.where}: the text has no tokens")
        for window, (context, continuation) in enumerate(_windows(ids, tokenizer.prefix_id, max_seq_len)):
            yield Score(document.index, window, tuple(context), tuple(continuation))


def _windows(ids: list[int], prefix: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    yield [prefix], ids[:size]
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        # What is read ends before the last scored token: size tokens from end - size - 1 on.
        yield ids[end - size - 1 : begin], ids[begin:end]
