"""Token ids of prompts as `transformers` makes them, by the tokenizers of `llmtrain.data`."""

from collections.abc import Sequence
from functools import cached_property

from llmtrain.data.tokenize.tokenizer import TextTokenizer
from llmtrain.eval.errors import EvalError


class PromptTokenizer:
    """Tokenizer of prompts: `plain` without special tokens, `special` with those that belong around a text (BOS, seldom EOS).

    As in transformers 5, the post-processor of tokenizer.json alone decides which those are; `add_bos_token` of
    tokenizer_config.json is ignored. Text that spells a special token becomes that token, unlike in training data.
    Raises EvalError for a bos_token that is not in the vocabulary.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._backend = tokenizer.backend
        self.eod_id = tokenizer.eod_id
        self.bos_token, self.bos_id = tokenizer.role_text("bos"), tokenizer.role_id("bos")
        if self.bos_token is not None and self.bos_id is None:
            raise EvalError(
                f"the tokenizer's bos_token {self.bos_token!r} is not in its vocabulary; correct tokenizer_config.json"
            )

    @property
    def prefix_id(self) -> int:
        """Token before a text without context: BOS, or the end-of-document token for tokenizers without BOS."""
        return self.eod_id if self.bos_id is None else self.bos_id

    @cached_property
    def prefix_token(self) -> str:
        """Text of that token."""
        return self._backend.decode([self.prefix_id], skip_special_tokens=False)

    @cached_property
    def puts_space_into_words(self) -> bool:
        """True if a word and the space before it are one token, as in byte-level BPE but not in SentencePiece."""
        return len(self.plain(" a")) == 1

    def plain(self, text: str) -> list[int]:
        return self.plain_batch([text])[0]

    def special(self, text: str) -> list[int]:
        return self.special_batch([text])[0]

    def plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts, encoded on all cores."""
        return self._encode(texts, False)

    def special_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, True)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        before = self._backend.encode_special_tokens
        self._backend.encode_special_tokens = False
        try:
            encoded = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        finally:
            self._backend.encode_special_tokens = before
        return [one.ids for one in encoded]
