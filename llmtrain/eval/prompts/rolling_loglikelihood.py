"""Log-likelihood of texts longer than the window (lm-evaluation-harness: `loglikelihood_rolling`).

Each token is scored once, with as much context as fits.
"""

from collections.abc import Iterator, Sequence

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import LoglikelihoodRequest
from llmtrain.eval.prompts.tokens import PromptTokenizer
from llmtrain.eval.tasks.documents import AnyDocument


def rolling_requests(
    documents: Sequence[AnyDocument], tokenizer: PromptTokenizer, max_seq_len: int, bad: dict[int, str] | None = None
) -> Iterator[LoglikelihoodRequest]:
    """One request per window, numbered within its document; the model reads at most max_seq_len tokens for each.

    As in lm-evaluation-harness, the first token follows BOS (EOS for tokenizers without BOS), windows are disjoint, and the
    context of the last one is so long that its window is full. bad: takes the reasons of texts without tokens, by index. Raises
    EvalError for the first of them where there is no `bad`.
    """
    for document in documents:
        text = document.text
        ids = tokenizer.plain(text) if text.startswith(tokenizer.prefix_token) else tokenizer.special(text)
        if not ids and bad is None:
            raise EvalError(f"{document.where}: the text has no tokens")
        if not ids and bad is not None:
            bad[document.index] = "the text has no tokens"
            continue
        for window, (context, continuation) in enumerate(_windows(ids, tokenizer.prefix_id, max_seq_len)):
            yield LoglikelihoodRequest(document.index, window, tuple(context), tuple(continuation))


def _windows(ids: list[int], prefix: int, size: int) -> Iterator[tuple[list[int], list[int]]]:
    yield [prefix], ids[:size]
    for begin in range(size, len(ids), size):
        end = min(begin + size, len(ids))
        # The model reads all but the last scored token: size tokens from end - size - 1 on.
        yield ids[end - size - 1 : begin], ids[begin:end]
