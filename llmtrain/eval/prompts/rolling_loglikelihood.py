"""Log-likelihood of texts longer than the window (lm-evaluation-harness: `loglikelihood_rolling`).

Each token is scored once, with as much context as fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import Document, Text


def rolling_requests(
    documents: Sequence[Document], tokenizer: PromptTokenizer, max_seq_len: int
) -> Iterator[LoglikelihoodRequest]:
    """One request per window, numbered within its document; the model reads at most max_seq_len tokens for each.

    As in lm-evaluation-harness, the first token follows BOS (EOS for tokenizers without BOS), windows are disjoint, and the
    context of the last one is so long that its window is full. Raises EvalError for a text without tokens.
    """
    for document in documents:
        assert isinstance(document.content, Text)
        ids = tokenizer.special(document.content.text)
        if not ids:
            raise EvalError(f"{document.where}: the text has no tokens")
        for window, (context, continuation) in enumerate(_windows(ids, tokenizer.prefix_id, max_seq_len)):
            yield LoglikelihoodRequest(document.index, window, tuple(context), tuple(continuation))


def _windows(ids: list[int], prefix: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    yield [prefix], ids[:size]
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        # The model reads all but the last scored token: size tokens from end - size - 1 on.
        yield ids[end - size - 1 : begin], ids[begin:end]
