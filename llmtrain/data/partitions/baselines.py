"""Compression baselines for a language model: xz and a unigram model on the same held-out text.

`prepare` computes both from the text; `read_baselines` reads them from the manifest.
"""

import lzma
import math
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.partitions.prepared_folder import read_manifest
from llmtrain.data.sources.files import PrepareError
from llmtrain.errors import UserError

XZ_BYTES = 4 << 20
"""The most held-out text that xz compresses, which takes seconds."""


@dataclass(frozen=True)
class Baselines:
    """Bits per byte of held-out text; None where there is no held-out text."""

    xz: float | None
    xz_bytes: int
    """Bytes of text that xz compressed."""
    unigram: float | None


def xz_bits_per_byte(text: bytes) -> float:
    """Bits per byte of `xz -9` on the held-out text alone (one stream, container included, no training text given).

    A compressor that has seen nothing starts cold, so this favours the language model; it is the figure anyone can
    check with `xz -9 -k FILE`. Raises UserError for empty text.
    """
    if not text:
        raise UserError("xz_bits_per_byte needs text")
    return 8 * len(lzma.compress(text, preset=9)) / len(text)


def unigram_bits_per_byte(
    train_counts: NDArray[np.int64], held_out_counts: NDArray[np.int64], held_out_bytes: int
) -> float:
    """Bits per byte of a unigram model over the same tokens: p(t) = (train_counts[t] + 1) / (sum + vocabulary).

    train_counts, held_out_counts: [vocab_size]. held_out_counts are of the tokens a language model is scored on (all
    but the first of each sample) and held_out_bytes the text they stand for. Raises UserError for no bytes.
    """
    if held_out_bytes <= 0:
        raise UserError("unigram_bits_per_byte needs held-out text")
    log_p = np.log2(train_counts + 1.0) - math.log2(train_counts.sum() + len(train_counts))
    return float(-(held_out_counts * log_p).sum() / held_out_bytes)


def read_baselines(out: str | os.PathLike[str]) -> Baselines:
    """The baselines of a prepared folder. Raises PrepareError if it is not one."""
    manifest = read_manifest(out)
    if manifest is None:
        raise PrepareError(f"{os.fspath(out)} is not a folder made by `llmtrain prepare`")
    return Baselines(**manifest["baselines"])
