"""Documents of token files in the form in which tokenized ones are packed: closed by the end-of-document token, with the bytes of
text that each token stands for."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.shards.packing import is_held_out, token_dtype
from llmtrain.data.sources.records import BadRecord, Slice
from llmtrain.data.sources.token_files import TokenSlice, read_tokens
from llmtrain.data.sources.token_kinds import TokenKind, side_file
from llmtrain.data.tokenize.encode import DocumentMarks, EncodedBatch

_BATCH_TOKENS = 1 << 20


class TokenFileReader:
    """Reader of slices of token files. tokenizer: the content of a tokenizer.json."""

    def __init__(
        self, tokenizer: str, vocab_size: int, marks: DocumentMarks, seed: int, validation_fraction: float
    ) -> None:
        self._vocab_size, self._marks = vocab_size, marks
        self._seed, self._fraction = seed, validation_fraction
        backend = Tokenizer.from_str(tokenizer)
        self._bytes = token_bytes(backend, vocab_size)
        added = backend.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}

    def __call__(self, part: Slice, kind: TokenKind) -> Iterator[tuple[EncodedBatch, list[int], str] | BadRecord]:
        """Documents of a slice, with the number of each, and the unit of these. Documents without a token are left out, and those
        with wrong borders, which are yielded first.

        Raises SetAside before the first one.
        """
        found = read_tokens(part, kind, self._vocab_size, self._marks.eod_id, self._special)
        for number in found.misplaced.tolist():
            length = int(found.ends[number] - (found.ends[number - 1] if number else 0))
            yield BadRecord(
                f"{part.file.path}, document {found.records[number] + 1}",
                f"its border in {side_file(part.file.path)} is not where its end-of-document token ({self._marks.eod_id}) is, as "
                "in the other documents: that file is damaged",
                nbytes=length * found.ids.itemsize,
            )
        begins = np.append(0, found.ends[:-1]) if len(found.ends) else found.ends
        groups = np.unique(begins // _BATCH_TOKENS, return_index=True)[1].tolist() if len(begins) else []
        for low, high in pairwise([*groups, len(begins)]):
            yield self._batch(part, found, begins, low, high)

    def _batch(
        self, part: Slice, found: TokenSlice, begins: NDArray[np.int64], low: int, high: int
    ) -> tuple[EncodedBatch, list[int], str]:
        dtype = token_dtype(self._vocab_size)
        end, bos_id = np.array([self._marks.eod_id], dtype), self._marks.bos_id
        ids: list[NDArray] = [np.zeros(0, dtype)]
        held_bytes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        held, tokens, text_bytes, records = [], [], [], []
        misplaced = set(found.misplaced.tolist())
        for number in range(low, high):
            document = found.ids[begins[number] : found.ends[number]].astype(dtype)
            if not len(document) or number in misplaced:
                continue
            if document[-1] != self._marks.eod_id and self._marks.closes:
                document = np.concatenate([document, end])
            if bos_id is not None and document[0] != bos_id:
                document = np.concatenate([np.array([bos_id], dtype), document])
            record = int(found.records[number])
            out = is_held_out(f"{part.file.name}@{record}", self._seed, self._fraction)
            sizes = self._bytes[document]
            ids.append(document)
            if out:
                held_bytes.append(sizes)
            held.append(out)
            tokens.append(len(document))
            text_bytes.append(int(sizes.sum()))
            records.append(record)
        batch = EncodedBatch(
            held_out=np.array(held, dtype=bool),
            ends=np.ones(len(held), dtype=bool),
            tokens=np.array(tokens, dtype=np.int64),
            text_bytes=np.array(text_bytes, dtype=np.int64),
            ids=np.concatenate(ids),
            held_bytes=np.concatenate(held_bytes),
        )
        return batch, records, found.unit


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> NDArray[np.int64]:
    """UTF-8 bytes of text that each token stands for; 0 for special tokens. Exact for a byte-level vocabulary; for others, that
    of the token behind another one (a document's first space, which SentencePiece leaves out, is counted). [vocab_size]."""
    settings = json.loads(tokenizer.to_str())
    decoder = json.dumps(settings.get("decoder") or {})
    sizes = np.zeros(vocab_size, np.int64)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    byte_level = '"ByteLevel"' in decoder
    probe = next((id for text, id in vocabulary.items() if text.isascii() and text.isalpha() and id not in added), None)
    before = len(tokenizer.decode([probe]).encode()) if probe is not None else 0
    for text, id in vocabulary.items():
        if id in added:
            sizes[id] = 0 if added[id].special else len(added[id].content.encode())
        elif byte_level:
            sizes[id] = len(text)  # a character per byte
        elif '"ByteFallback"' in decoder and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            sizes[id] = 1
        else:
            pair = tokenizer.decode([id] if probe is None else [probe, id], skip_special_tokens=False)
            sizes[id] = max(len(pair.encode()) - before, 0)
    return sizes
