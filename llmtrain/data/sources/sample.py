"""Samples of the sources, taken evenly: to train a tokenizer on, and to prove an engine that tokenizes."""

import bisect
import itertools
from collections.abc import Iterator

from llmtrain.data.partitions.cutting import splits
from llmtrain.data.shards.packing import is_held_out
from llmtrain.data.sources.files import SourceFile
from llmtrain.data.sources.records import BadRecord, DocumentPiece, SetAside, Slice, read_slice, whole
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.data.sources.tolerance import Tolerance
from llmtrain.schema.data import PrepareConfig

BPE_SAMPLE_BYTES = 64 << 20
"""About the most text that a tokenizer is trained on, taken evenly from the sources' training split."""
SAMPLE_SLICE_BYTES = 1 << 20
PLACES, PLACE_CHARACTERS = 16, 1 << 16
"""Places of the sources from which so much text is taken to prove an engine."""


def training_texts(config: PrepareConfig, files: list[SourceFile], text_key: str) -> Iterator[str]:
    """Texts of the training split to train a tokenizer on. Bad records that may be skipped are, and reported when the shards are
    made. text_key: the config's, or that of its conversations.

    Raises PrepareError for what cannot be read and may not be skipped.
    """
    tolerance, lost = Tolerance(config.max_bad, config.skip_bad_records), 0
    named: list[str] = []
    for part, most in sample_slices(files, BPE_SAMPLE_BYTES, config.max_bytes, text_key):
        read = 0
        try:
            for piece in read_slice(part, text_key):
                if isinstance(piece, BadRecord):
                    tolerance.refuse(piece)
                else:
                    read += len(piece.text)
                    if not is_held_out(piece.name, config.seed, config.validation_fraction):
                        yield piece.text
                if most is not None and read >= most:
                    break
        except SetAside as error:
            tolerance.refuse(error.bad)
            if not error.bad.fatal:
                lost += error.bad.nbytes
                named.append(str(error.bad))
    tolerance.refuse_no_text(files, len(named), lost, named)


def sample_slices(
    files: list[SourceFile], sample_bytes: int, max_bytes: int | None, text_key: str
) -> Iterator[tuple[Slice, int | None]]:
    """Slices of about `sample_bytes` in all, spread evenly over the first `max_bytes` of the files, with the most to read of each.

    Of a file that is read from its beginning only, the beginning is taken.
    """
    total = sum(file.size for file in files)
    total = min(total, max_bytes or total)
    share = min(1.0, sample_bytes / max(total, 1))
    credit, seen = 0.0, 0
    for file in files:
        if seen >= total:
            return
        seen += file.size
        if share == 1.0:
            yield whole(file), None
        elif file.size > SAMPLE_SLICE_BYTES and not splits(file, text_key):
            yield whole(file), int(file.size * share)
        else:
            for begin in range(0, file.size, SAMPLE_SLICE_BYTES):
                part = Slice(file, begin, min(begin + SAMPLE_SLICE_BYTES, file.size))
                credit += (part.end - part.begin) * share
                if credit >= part.end - part.begin:
                    yield part, None
                    credit -= part.end - part.begin


def proof_texts(files: list[SourceFile], text_key: str) -> list[str]:
    """Texts from up to PLACES places of the sources, spread evenly over their bytes. What cannot be read is passed over."""
    ends = list(itertools.accumulate(file.size for file in files))
    total = ends[-1] if ends else 0
    texts: list[str] = []
    taken: set[tuple[int, int]] = set()
    for place in range(PLACES):
        number = bisect.bisect_right(ends, total * (2 * place + 1) // (2 * PLACES))
        if number == len(files) or token_kind(files[number].path, files[number].from_folder):
            continue
        file, block = files[number], 0
        if file.size > SAMPLE_SLICE_BYTES and splits(file, text_key):
            block = (total * (2 * place + 1) // (2 * PLACES) - (ends[number] - file.size)) // SAMPLE_SLICE_BYTES
        if (number, block) in taken:
            continue
        taken.add((number, block))
        begin = block * SAMPLE_SLICE_BYTES
        part = Slice(file, begin, min(begin + SAMPLE_SLICE_BYTES, file.size)) if begin else whole(file)
        texts += _first_texts(part, text_key)
    return texts


def _first_texts(part: Slice, text_key: str) -> Iterator[str]:
    left = PLACE_CHARACTERS
    try:
        for piece in read_slice(part, text_key):
            if isinstance(piece, DocumentPiece):
                yield piece.text[:left]
                left -= len(piece.text)
            if left <= 0:
                return
    except SetAside:
        return
