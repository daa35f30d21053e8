"""Reading, splitting and tokenising units in worker processes. Imports neither torch nor transformers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.packing import bytes_per_token, is_held_out, token_dtype
from llmtrain.data.records import BadRecord, DocumentPiece, Unit, read_pieces
from llmtrain.data.source_files import PrepareError

TRAIN, VALIDATION = 0, 1


@dataclass(frozen=True)
class EncodeSettings:
    """Settings sent to every worker. tokenizer: the content of a tokenizer.json."""

    tokenizer: str
    eod_id: int
    text_key: str
    seed: int
    validation_fraction: float


@dataclass(frozen=True)
class EncodedUnit:
    """The pieces of one unit, in order; all arrays over pieces have the same length [p].

    ids: [n] tokens of all pieces, one after the other, documents closed by the end-of-document token.
    held_bytes: [m] UTF-8 bytes of text per token, for the tokens of held-out pieces only.
    held_text: per held-out piece its text.
    """

    held_out: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    ids: NDArray
    held_bytes: NDArray[np.int64]
    held_text: list[bytes]
    bad: list[BadRecord]
    stored_bytes: int
    """Bytes of the sources in this unit, for the progress bar."""


class UnitEncoder:
    """Callable that reads, splits and tokenises a unit."""

    def __init__(self, settings: EncodeSettings) -> None:
        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer)
        self.tokenizer.encode_special_tokens = True  # not stored in tokenizer.json; see make_tokenizer
        self.dtype = token_dtype(max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1)

    def __call__(self, unit: Unit) -> EncodedUnit:
        settings = self.settings
        items = [item for span in unit for item in read_pieces(span, settings.text_key)]
        pieces = [item for item in items if isinstance(item, DocumentPiece)]
        held = [is_held_out(piece.name, settings.seed, settings.validation_fraction) for piece in pieces]
        train_texts = [piece.text for piece, out in zip(pieces, held, strict=True) if not out]
        train = iter(self.tokenizer.encode_batch_fast(train_texts, add_special_tokens=False))
        ids: list[list[int]] = []
        held_bytes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        for piece, out in zip(pieces, held, strict=True):
            if out:
                # encode_batch_fast() returns no offsets.
                encoding = self.tokenizer.encode(piece.text, add_special_tokens=False)
                held_bytes.append(_token_bytes(piece, encoding.offsets))
            else:
                encoding = next(train)
            ids.append([*encoding.ids, settings.eod_id] if piece.ends else encoding.ids)
        return EncodedUnit(
            held_out=np.array(held, dtype=bool),
            ends=np.array([piece.ends for piece in pieces], dtype=bool),
            tokens=np.array([len(tokens) for tokens in ids], dtype=np.int64),
            text_bytes=np.array([len(piece.text.encode()) for piece in pieces], dtype=np.int64),
            ids=np.array([token for tokens in ids for token in tokens], dtype=self.dtype),
            held_bytes=np.concatenate(held_bytes),
            held_text=[piece.text.encode() for piece, out in zip(pieces, held, strict=True) if out],
            bad=[item for item in items if isinstance(item, BadRecord)],
            stored_bytes=sum(span.end - span.begin for span in unit),
        )


def _token_bytes(piece: DocumentPiece, offsets: list[tuple[int, int]]) -> NDArray[np.int64]:
    """Bytes per token of a piece. Text that no token covers counts for the end-of-document token, or else for the last one."""
    sizes = bytes_per_token(piece.text, offsets)
    if piece.ends:
        return sizes
    if len(sizes) > 1:
        sizes[-2] += sizes[-1]
    return sizes[:-1]


_encoder: UnitEncoder | None = None


def _start_worker(settings: EncodeSettings) -> None:
    global _encoder
    # There is one process per core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = UnitEncoder(settings)


def _encode_unit(unit: Unit) -> EncodedUnit:
    assert _encoder is not None
    return _encoder(unit)


def encode_units(units: Iterator[Unit], settings: EncodeSettings, workers: int) -> Iterator[EncodedUnit]:
    """Encode units in `workers` processes. Yields results in the order of the units, with at most 2 * workers in flight."""
    if workers == 1:
        yield from map(UnitEncoder(settings), units)
        return
    # Not fork: the parent may hold threads (tokenizers, CUDA).
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (settings,)) as pool:
        waiting: list[Future[EncodedUnit]] = [pool.submit(_encode_unit, unit) for unit in islice(units, 2 * workers)]
        try:
            while waiting:
                result = waiting.pop(0).result()
                waiting += [pool.submit(_encode_unit, unit) for unit in islice(units, 1)]
                yield result
        except BrokenProcessPool as error:
            raise PrepareError(
                "a worker process died (out of memory?); try fewer with data.prepare.workers or --workers"
            ) from error
        finally:
            for future in waiting:
                future.cancel()
