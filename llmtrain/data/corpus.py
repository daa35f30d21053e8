"""Writing encoded units as MDS shards, and the counts for the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.baselines import XZ_BYTES, unigram_bits_per_byte, xz_bits_per_byte
from llmtrain.data.encode import EncodedUnit
from llmtrain.data.packing import pack, token_dtype
from llmtrain.data.records import BadRecord
from llmtrain.data.source_files import PrepareError
from llmtrain.schema.data import PrepareConfig

NAMED_BAD_RECORDS = 20
"""Number of skipped records that the manifest names; all are counted."""
TOKENS, TEXT_BYTES = "tokens", "text_bytes"
"""Columns of the shards. TEXT_BYTES, in validation only, is the UTF-8 bytes of text behind a sample's scored tokens,
that is all but its first, so that bits per byte = bits of the scored tokens / sum of TEXT_BYTES is exact for any
set of samples, whatever was dropped at the end of the split."""


class SplitWriter:
    """Writer of one split: packs tokens, writes shards, counts."""

    def __init__(self, folder: Path, seq_len: int, vocab_size: int, held_out: bool) -> None:
        from streaming import MDSWriter  # imports torch: only the parent process may pay for that

        self.seq_len = seq_len
        self.held_out = held_out
        self.dtype = token_dtype(vocab_size)
        columns = {TOKENS: f"ndarray:{self.dtype}:{seq_len}"} | ({TEXT_BYTES: "int"} if held_out else {})
        self._writer = MDSWriter(columns=columns, out=str(folder), compression="zstd", hashes=["xxh64"])
        self._rest = np.zeros(0, self.dtype)
        self._rest_bytes = np.zeros(0, np.int64)
        self.counts = np.zeros(vocab_size, np.int64)
        """[vocab_size], number of times each token is stored; for validation, scored."""
        self.documents = self.bytes = self.tokens = self.samples = self.bytes_covered = self.bytes_scored = 0
        self.open_document = False

    def add(self, ids: NDArray, token_bytes: NDArray[np.int64], pieces_end: NDArray[np.bool_], text_bytes: int) -> None:
        """ids: [n] tokens of some pieces; token_bytes: [n] for held-out text, [0] otherwise; pieces_end: [p]."""
        if not len(pieces_end):
            return
        self.documents += int(pieces_end.sum())
        self.open_document = not pieces_end[-1]
        self.bytes += text_bytes
        self.tokens += len(ids)
        samples, self._rest = pack(self._rest, ids, self.seq_len)
        self.samples += len(samples)
        if not self.held_out:
            self.counts += np.bincount(samples.ravel(), minlength=len(self.counts))
            for sample in samples:
                self._writer.write({TOKENS: sample})
            return
        sizes, self._rest_bytes = pack(self._rest_bytes, token_bytes, self.seq_len)
        self.counts += np.bincount(samples[:, 1:].ravel(), minlength=len(self.counts))
        self.bytes_covered += int(sizes.sum())
        self.bytes_scored += int(sizes[:, 1:].sum())
        for sample, size in zip(samples, sizes, strict=True):
            self._writer.write({TOKENS: sample, TEXT_BYTES: int(size[1:].sum())})

    def close_document(self, eod_id: int) -> None:
        """Close the document that `max_bytes` cut, if any."""
        if self.open_document:
            zero = np.zeros(int(self.held_out), np.int64)
            self.add(np.array([eod_id], self.dtype), zero, np.ones(1, bool), 0)

    def finish(self) -> dict[str, int]:
        self._writer.finish()
        stats = {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "samples": self.samples,
        }
        return (
            stats | {"bytes_covered": self.bytes_covered, "bytes_scored": self.bytes_scored} if self.held_out else stats
        )


class CorpusWriter:
    """Writer of both splits, in the order of the units."""

    def __init__(self, folder: Path, config: PrepareConfig, vocab_size: int, eod_id: int) -> None:
        self.config = config
        self.eod_id = eod_id
        self.train = SplitWriter(folder / "train", config.seq_len, vocab_size, held_out=False)
        self.validation: SplitWriter | None = None
        if config.validation_fraction > 0:
            self.validation = SplitWriter(folder / "validation", config.seq_len, vocab_size, held_out=True)
        self.bytes_left = config.max_bytes
        self.held_text = bytearray()
        self.bad: list[str] = []
        self.bad_count = 0

    def add(self, unit: EncodedUnit) -> bool:
        """Write one unit. Returns whether max_bytes is reached. Raises PrepareError for a bad record that is not to be skipped."""
        for record in unit.bad:
            self._record_bad(record)
        keep = len(unit.tokens)
        if self.bytes_left is not None:
            before = np.cumsum(unit.text_bytes) - unit.text_bytes
            keep = int(np.searchsorted(before, self.bytes_left))
            self.bytes_left -= int(unit.text_bytes[:keep].sum())
        held, tokens = unit.held_out[:keep], unit.tokens[:keep]
        ids = unit.ids[: int(tokens.sum())]
        is_held_token = np.repeat(held, tokens)
        none = np.zeros(0, np.int64)
        self.train.add(ids[~is_held_token], none, unit.ends[:keep][~held], int(unit.text_bytes[:keep][~held].sum()))
        if self.validation:
            held_bytes = unit.held_bytes[: int(is_held_token.sum())]
            self.validation.add(
                ids[is_held_token], held_bytes, unit.ends[:keep][held], int(unit.text_bytes[:keep][held].sum())
            )
            for text in unit.held_text[: int(held.sum())]:
                self.held_text += text[: XZ_BYTES - len(self.held_text)]
        return self.bytes_left is not None and self.bytes_left <= 0

    def _record_bad(self, record: BadRecord) -> None:
        if record.fatal and not self.config.skip_bad_records:
            raise PrepareError(f"{record}\nmend it, or skip such records with skip_bad_records (--skip-bad-records)")
        self.bad_count += 1
        if len(self.bad) < NAMED_BAD_RECORDS:
            self.bad.append(str(record))

    def finish(self) -> dict[str, Any]:
        """Close the shards. Returns the manifest's counts; raises PrepareError for a split without a single sample."""
        splits: dict[str, Any] = {}
        for name, split in (("train", self.train), ("validation", self.validation)):
            if split is None:
                continue
            split.close_document(self.eod_id)
            splits[name] = split.finish()
            if not split.samples:
                raise PrepareError(self._too_small(name, split))
        return {
            "splits": splits,
            "skipped": {"count": self.bad_count, "first": self.bad},
            "baselines": self._baselines(),
        }

    def _too_small(self, name: str, split: SplitWriter) -> str:
        text = (
            f"the {name} part has {split.documents} documents of {split.tokens} tokens in all, "
            f"less than one sample of seq_len {self.config.seq_len}; give more text or a smaller seq_len"
        )
        if name == "validation":
            text += (
                ", raise validation_fraction, or set it to 0 for no validation (whole files and records are held out)"
            )
        return text

    def _baselines(self) -> dict[str, Any]:
        if self.validation is None:
            return {"xz": None, "xz_bytes": 0, "unigram": None}
        scored = self.validation.bytes_scored
        return {
            "xz": xz_bits_per_byte(bytes(self.held_text)) if self.held_text else None,
            "xz_bytes": len(self.held_text),
            "unigram": unigram_bits_per_byte(self.train.counts, self.validation.counts, scored) if scored else None,
        }
