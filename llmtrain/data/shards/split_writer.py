"""Packing tokens of one split into samples, and writing these as MDS shards, with the counts for the manifest."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.shards.best_fit import BestFitPacker
from llmtrain.data.shards.index import FLAG_COLUMN
from llmtrain.data.shards.mds_writer import ShardWriter
from llmtrain.data.shards.packing import ENDS, TRAINED, pack, token_dtype, with_flags, without_flags

TOKENS, TEXT_BYTES = "tokens", "text_bytes"
"""Columns of the shards. TEXT_BYTES, in validation only, is the UTF-8 bytes of text behind a sample's scored tokens,
that is all but its first, so that bits per byte = bits of the scored tokens / sum of TEXT_BYTES is exact for any
set of samples, whatever was dropped at the end of the split."""

_COUNTED_TOGETHER = 1 << 16
"""Tokens whose counting needs no memory beyond a core's cache."""


class SplitWriter:
    """Writer of one split: packs tokens, writes shards, counts. name: what the names of its shards begin with. counted: whether
    each token is counted. pad_id: keep documents whole, by best fit or each in a sample of its own (`alone`), and fill with this
    token. flagged: tokens come with flags, which are stored beside them."""

    def __init__(
        self,
        folder: Path,
        name: str,
        seq_len: int,
        vocab_size: int,
        held_out: bool,
        counted: bool = True,
        compression: str = "none",
        pad_id: int | None = None,
        alone: bool = False,
        flagged: bool = False,
    ) -> None:
        self.seq_len = seq_len
        self.held_out = held_out
        self.dtype = token_dtype(vocab_size)
        columns = {TEXT_BYTES: ("int", 8)} if held_out else {}
        columns |= {FLAG_COLUMN: (f"ndarray:uint8:{seq_len}", seq_len)} if flagged else {}
        columns[TOKENS] = (f"ndarray:{self.dtype}:{seq_len}", seq_len * np.dtype(self.dtype).itemsize)
        self._writer = ShardWriter(folder, name, columns, compression)
        self.rest = np.zeros(0, self.dtype)
        """[fewer than seq_len] tokens that no sample holds yet."""
        self.rest_bytes = np.zeros(0, np.int64)
        """Bytes of text behind each of them, in validation."""
        self.counts = np.zeros(vocab_size, np.int64)
        """[vocab_size], number of times each token is stored; for validation, scored. 0 where they are not counted."""
        self._counted = counted
        self.documents = self.bytes = self.tokens = self.samples = self.bytes_covered = self.bytes_scored = 0
        self._flagged, self.trained = flagged, 0
        self.best_fit = None
        if pad_id is not None:
            pad, dtype = (int(with_flags(np.array(pad_id), ENDS)), "uint32") if flagged else (pad_id, self.dtype)
            self.best_fit = BestFitPacker(seq_len, pad, dtype, held_out, alone)
        self.open_document = False
        """True while the last document has not ended."""

    def add(
        self,
        ids: NDArray,
        token_bytes: NDArray[np.int64],
        pieces: NDArray[np.int64],
        pieces_end: NDArray[np.bool_],
        text_bytes: int,
    ) -> None:
        """ids: [n] tokens of some pieces; token_bytes: [n] for held-out text, [0] otherwise; pieces, pieces_end: [p], the tokens of
        each, and whether a document ends there."""
        if not len(pieces_end):
            return
        self.documents += int(pieces_end.sum())
        self.open_document = not pieces_end[-1]
        self.bytes += text_bytes
        self.tokens += len(ids)
        if self.best_fit is None:
            self.pack(ids, token_bytes)
        elif laid_out := self.best_fit.add(ids, token_bytes, pieces, pieces_end):
            self._write(*laid_out)

    def pack(self, ids: NDArray, token_bytes: NDArray[np.int64]) -> None:
        """Tokens that are counted already."""
        samples, self.rest = pack(self.rest, ids, self.seq_len)
        sizes, self.rest_bytes = pack(self.rest_bytes, token_bytes, self.seq_len)
        self._write(samples, sizes)

    def _write(self, samples: NDArray, sizes: NDArray[np.int64]) -> None:
        """samples: [k, seq_len]; sizes: bytes of text behind each token, in validation."""
        self.samples += len(samples)
        columns = []
        if self._flagged:
            samples, flags = without_flags(samples, self.dtype)
            self.trained += int(np.count_nonzero(flags & TRAINED))
            columns.append(flags)
        columns.append(samples.view(np.uint8))
        if self._counted:
            self._count(samples[:, 1:] if self.held_out else samples)
        if self.held_out:
            scored = sizes[:, 1:].sum(1, keepdims=True)
            self.bytes_covered += int(sizes.sum())
            self.bytes_scored += int(scored.sum())
            columns.insert(0, scored.view(np.uint8))
        self._writer.write(columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1))

    def _count(self, samples: NDArray) -> None:
        tokens, step = samples.ravel(), max(_COUNTED_TOGETHER, len(self.counts))
        for begin in range(0, len(tokens), step):
            self.counts += np.bincount(tokens[begin : begin + step], minlength=len(self.counts))

    def finish(self) -> tuple[dict[str, int], list[dict[str, Any]]]:
        """Write the last shard. Returns the counts, and the index's entries."""
        if self.best_fit is not None:
            self._write(*self.best_fit.finish())
        entries = self._writer.finish()
        stats = {"documents": self.documents, "bytes": self.bytes, "tokens": self.tokens, "samples": self.samples}
        if self.held_out:
            stats |= {"bytes_covered": self.bytes_covered, "bytes_scored": self.bytes_scored}
        if self.best_fit is not None:
            stats["padding"] = self.best_fit.padding
        if self._flagged:
            stats["trained"] = self.trained
        return stats, entries
