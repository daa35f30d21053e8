"""Files of token ids that other programs wrote: read as they are, without tokenizing again.

- Megatron's `X.bin` with `X.idx` (Megatron-LM, `core/datasets/indexed_dataset.py`): the index begins with MMIDIDX, version 1, a
  code for the type of the ids, and the numbers of sequences and of borders between documents; then follow the sequences'
  lengths (int32), their first bytes in `X.bin` (int64), and the documents' first sequences (int64, with the end).
- datatrove's `X.ds` with `X.ds.index` (`pipeline/tokens/tokenizer.py`): ids of 2 or 4 bytes, and the ends of the documents
  (uint64, in tokens).
- OLMo's `X.npy` (dolma, `tokenizer/memmap_writer.py`): bare ids, uint16 or uint32, whatever holds the vocabulary; documents end
  with the end-of-document token. A header of numpy is read too.
"""

import bisect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from tokenize import TokenError
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.shards.packing import document_ends
from llmtrain.data.sources.compression import DAMAGES
from llmtrain.data.sources.records import BadRecord, SetAside, Slice
from llmtrain.data.sources.storage import open_file
from llmtrain.data.sources.token_kinds import MEGATRON_MAGIC, NUMPY_MAGIC, TokenKind, loss_mask

_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's codes of integers; 6 and 7 are of floating point."""
_LONGEST_DOCUMENT = 1 << 26
"""Tokens of a document of a .npy: without an end in so many, they are taken to be of another tokenizer."""


@dataclass(frozen=True)
class TokenSlice:
    """Documents that begin in a slice. ids: their tokens, one after the other; ends: where each ends; records: the number of
    each, from 0, in `unit`s. misplaced: those whose borders are wrong, by number in the slice; see `_misplaced`."""

    ids: NDArray
    ends: NDArray[np.int64]
    records: NDArray[np.int64]
    unit: str
    misplaced: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


def read_tokens(part: Slice, kind: TokenKind, vocab_size: int, eod_id: int, special: dict[int, str]) -> TokenSlice:
    """The documents that begin in a slice. special: the tokenizer's special tokens, by id.

    Raises SetAside for a file that is damaged, or was made with another tokenizer.
    """
    path = part.file.path
    try:
        with open_file(path) as stream:
            if kind == "npy":
                found = _npy(part, stream, vocab_size, eod_id)
            else:
                found = _indexed(stream, (_megatron if kind == "megatron" else _datatrove)(part, path), eod_id)
        _check(found, vocab_size, eod_id, special)
    except _Fault as error:
        raise SetAside(BadRecord(path, str(error), nbytes=part.end - part.begin)) from error
    except DAMAGES as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SetAside(BadRecord(path, reason, nbytes=part.end - part.begin)) from error
    return found


class _Fault(Exception):
    """The reason why a token file cannot be used."""


@dataclass(frozen=True)
class _Borders:
    """Documents that begin in a slice: their number, first byte and the byte behind each."""

    dtype: str
    first: int
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Column:
    """An array in a file, of which parts are read."""

    def __init__(self, stream: BinaryIO, offset: int, dtype: str, count: int) -> None:
        self._stream, self._offset, self._dtype, self._count = stream, offset, np.dtype(dtype), count

    def __len__(self) -> int:
        return self._count

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        if not 0 <= begin <= end <= self._count:
            raise _Fault("its index names places that it has not")
        self._stream.seek(self._offset + begin * self._dtype.itemsize)
        return _array(self._stream, self._dtype.str, end - begin).astype(np.int64)

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, index + 1)[0])


def _array(stream: BinaryIO, dtype: str, count: int) -> NDArray:
    """Numbers, little-endian as all of these formats have them."""
    at, wanted = stream.tell(), count * np.dtype(dtype).itemsize
    there = (
        stream.seek(0, os.SEEK_END) - at
    )  # before it is read: as much memory would be taken as a damaged index asks for
    stream.seek(at)
    if wanted > there:
        raise _Fault("it is cut short")
    content = stream.read(wanted)
    return np.frombuffer(content, dtype)


def _between(part: Slice, count: int, begin_of: Callable[[int], int]) -> tuple[int, int]:
    """The first of `count` documents that begins in a slice, and the one behind the last. A file's first and last slices have its
    first and last documents, wherever a damaged index has them."""

    def first_from(byte: int) -> int:
        if 0 < byte < part.file.size:
            return bisect.bisect_left(range(count), byte, key=begin_of)
        return count if byte else 0

    return first_from(part.begin), first_from(part.end)


def _megatron(part: Slice, path: str) -> _Borders:
    index = f"{os.path.splitext(path)[0]}.idx"
    with open_file(index) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        if stream.read(len(MEGATRON_MAGIC)) != MEGATRON_MAGIC or int.from_bytes(stream.read(8), "little") != 1:
            raise _Fault(f"{index} is not a Megatron index of version 1")
        code = int.from_bytes(stream.read(1), "little")
        sequences, borders = (int.from_bytes(stream.read(8), "little") for _ in range(2))
        if code not in _TYPES:
            raise _Fault(f"{index} is of ids of type {code}, which are no whole numbers")
        at = stream.tell()
        if size != at + 12 * sequences + 8 * borders:
            raise _Fault(
                f"{index} has {size:,} bytes; its {sequences:,} sequences and {borders:,} borders of documents make "
                f"{at + 12 * sequences + 8 * borders:,} (one with images or the like is not read)"
            )
        itemsize = np.dtype(_TYPES[code]).itemsize
        lengths = _Column(stream, at, "<i4", sequences)
        begins = _Column(stream, at + 4 * sequences, "<i8", sequences)
        documents = _Column(stream, at + 12 * sequences, "<i8", borders)
        if sequences and (not borders or documents[0] != 0 or documents[borders - 1] != sequences):
            raise _Fault(f"the documents of {index} are not all of its {sequences:,} sequences")
        if sequences and part.file.size != begins[sequences - 1] + lengths[sequences - 1] * itemsize:
            raise _Fault(f"it has {part.file.size:,} bytes, which are not those that {index} describes")

        def begin_of(document: int) -> int:
            sequence = documents[document]
            return begins[sequence] if sequence < sequences else part.file.size

        count = borders - 1
        first, last = _between(part, count, begin_of)
        if first >= last:
            return _Borders(_TYPES[code], first, *(np.zeros(0, np.int64),) * 2)
        firsts = documents.read(first, last + 1)
        some = begins.read(int(firsts[0]), int(firsts[-1]))
        stops = some + lengths.read(int(firsts[0]), int(firsts[-1])) * itemsize
        after = begins[int(firsts[-1])] if firsts[-1] < sequences else part.file.size
        if (np.append(some[1:], after) != stops).any() or (np.diff(firsts) < 0).any():
            raise _Fault(f"the sequences of {index} do not follow one another")
        borders_in = np.append(some, stops[-1:])[firsts - firsts[0]]
        return _Borders(_TYPES[code], first, borders_in[:-1], borders_in[1:])


def _datatrove(part: Slice, path: str) -> _Borders:
    index = f"{path}.index"
    if mask := loss_mask(path):
        raise _Fault(
            f"{mask} takes some of its tokens out of the loss, which is not done here; remove it to train on all"
        )
    with open_file(index) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size % 8:
            raise _Fault(f"{index} has {size:,} bytes, no multiple of 8")
        ends = _Column(stream, 0, "<u8", size // 8)
        total = ends[len(ends) - 1] if len(ends) else 0
        itemsize = part.file.size // max(total, 1)
        if part.file.size != total * itemsize or (total and itemsize not in (2, 4)):
            raise _Fault(
                f"it has {part.file.size:,} bytes, which are not 2 or 4 for each of the {total:,} tokens of {index}"
            )
        dtype = f"uint{8 * itemsize}" if total else "uint16"
        first, last = _between(part, len(ends), lambda number: (ends[number - 1] if number else 0) * itemsize)
        found = ends.read(max(first - 1, 0), last) * itemsize
        begins = found[:-1] if first else np.append(0, found[:-1])
        stops = found[1:] if first else found
        if first >= last:
            begins = stops = np.zeros(0, np.int64)
        if (stops < begins).any():
            raise _Fault(f"the ends of the documents in {index} do not rise")
        return _Borders(dtype, first, begins, stops)


def _indexed(stream: BinaryIO, borders: _Borders, eod_id: int) -> TokenSlice:
    if not len(borders.begins):
        return TokenSlice(np.zeros(0, borders.dtype), borders.ends, borders.ends, "document")
    begin, itemsize = int(borders.begins[0]), np.dtype(borders.dtype).itemsize
    before = min(begin, itemsize)
    stream.seek(begin - before)
    ids = _array(stream, borders.dtype, (int(borders.ends[-1]) - begin + before) // itemsize)
    opened, ids = not before or int(ids[0]) == eod_id, ids[before // itemsize :]
    ends, records = (borders.ends - begin) // itemsize, borders.first + np.arange(len(borders.ends))
    return TokenSlice(ids, ends, records, "document", np.flatnonzero(_misplaced(ids, ends, eod_id, opened)))


def _misplaced(ids: NDArray, ends: NDArray[np.int64], eod_id: int, opened: bool) -> NDArray[np.bool_]:
    """True at documents beside a border that their index has elsewhere than their tokens have it. An index has no checksum, but
    where documents end with the end-of-document token, a moved border leaves one without it beside one that holds two.

    opened: the document before the first ends with it. Nothing is found where the token marks no ends, or stands within most.
    """
    begins = np.append(0, ends[:-1])
    some, closed, holds = ends > begins, np.zeros(len(ends), bool), np.zeros(len(ends), bool)
    closed[some] = ids[ends[some] - 1] == eod_id
    places = np.flatnonzero(ids == eod_id)
    owners = np.searchsorted(ends, places, side="right")
    inner = places != ends[owners] - 1
    if 2 * (ids[begins[some]] == eod_id).sum() > some.sum():  # documents begin with it too
        inner &= places != begins[owners]
    holds[owners[inner]] = True
    if 2 * closed.sum() <= some.sum() or 2 * holds.sum() > some.sum():
        return np.zeros(len(ends), bool)
    borders = ~np.append(opened, closed) & (np.append(holds, False) | np.append(False, holds))
    borders[1:-1] |= (holds[:-1] & ~some[1:]) | (~some[:-1] & holds[1:])
    return borders[:-1] | borders[1:]


def _npy(part: Slice, stream: BinaryIO, vocab_size: int, eod_id: int) -> TokenSlice:
    dtype, offset = _npy_type(part, stream, vocab_size)
    itemsize = np.dtype(dtype).itemsize
    total, rest = divmod(part.file.size - offset, itemsize)
    if rest:
        raise _Fault(f"its {part.file.size - offset:,} bytes are no multiple of {itemsize}, the bytes of a token")
    begin, end = (min(max(-(-(byte - offset) // itemsize), 0), total) for byte in (part.begin, part.end))
    stream.seek(offset)
    opened = total > 0 and int(_array(stream, dtype, 1)[0]) == eod_id  # documents begin with it too
    # The token before decides whether a document begins here; those around an end, whether it is one.
    before, first, last = min(begin, 1), max(begin - 2, 0), min(end + 1, total)
    stream.seek(offset + first * itemsize)
    around = _array(stream, dtype, last - first)
    here = slice(begin - before - first, end - first)
    ids, ends = around[here], np.flatnonzero(document_ends(around, eod_id, opened)[here]) + 1
    stream.seek(offset + end * itemsize)
    if before:
        if not len(ends) or begin == end:
            return TokenSlice(ids[:0], np.zeros(0, np.int64), np.zeros(0, np.int64), "token")
        ids, ends = ids[ends[0] :], ends - ends[0]
        begin, ends = end - len(ids), ends[1:]
    parts, length = [ids], len(ids)
    while (
        begin < end and length and (not len(ends) or ends[-1] < length) and begin + length < total
    ):  # to the last one's end
        if length - (int(ends[-1]) if len(ends) else 0) > _LONGEST_DOCUMENT:
            raise _Fault(
                f"token {eod_id}, which ends a document, is not in {_LONGEST_DOCUMENT:,} tokens: the file was made with another "
                "tokenizer, or holds no ends of documents"
            )
        more = _array(stream, dtype, min(1 << 20, total - begin - length))
        stop = np.flatnonzero(more == eod_id)
        parts.append(more[: int(stop[0]) + 1] if len(stop) else more)
        length += len(parts[-1])
        ends = np.append(ends, length) if len(stop) else ends
    if length and (not len(ends) or ends[-1] < length):
        ends = np.append(ends, length)  # the file's last document
    begins = np.append(0, ends[:-1]) if len(ends) else ends
    return TokenSlice(np.concatenate(parts), ends.astype(np.int64), (begin + begins).astype(np.int64), "token")


def _npy_type(part: Slice, stream: BinaryIO, vocab_size: int) -> tuple[str, int]:
    """(type of the ids, byte at which they begin)."""
    head = stream.read(len(NUMPY_MAGIC))
    stream.seek(0)
    if head == NUMPY_MAGIC:
        try:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        except (ValueError, SyntaxError, TokenError) as error:  # numpy reads it as Python's text
            raise _Fault(f"its header is damaged: {error}") from error
        if len(shape) != 1 or dtype.kind not in "ui":
            raise _Fault(f"it holds an array of {dtype} of shape {shape}, not one row of token ids")
        if part.file.size != stream.tell() + shape[0] * dtype.itemsize:
            raise _Fault(
                f"it has {part.file.size:,} bytes, which are not those of the {shape[0]:,} tokens of its header"
            )
        return dtype.str, stream.tell()
    if vocab_size > 1 << 16:
        return "<u4", 0
    some = np.frombuffer(stream.read(min(part.file.size, 1 << 16) // 4 * 4), "<u2").reshape(-1, 2)
    wide = len(some) > 1 and not some[:, 1].any() and some[:, 0].any()  # the upper halves of uint32
    return ("<u4" if wide else "<u2"), 0


def _check(found: TokenSlice, vocab_size: int, eod_id: int, special: dict[int, str]) -> None:
    if not len(found.ids):
        return
    lowest, highest = int(found.ids.min()), int(found.ids.max())
    if not 0 <= lowest <= highest < vocab_size:
        wrong = highest if lowest >= 0 else lowest
        raise _Fault(
            f"it holds token {wrong:,}, but the tokenizer has {vocab_size:,} entries: the file was made with another one"
        )
    lasts = np.unique(found.ids[found.ends[found.ends > 0] - 1])
    if len(lasts) == 1 and len(found.ends) > 1 and int(lasts[0]) != eod_id and int(lasts[0]) in special:
        last = int(lasts[0])
        raise _Fault(
            f"its documents end with token {last} ({special[last]}), but the tokenizer's end of document is token {eod_id}: name "
            "the tokenizer that it was made with"
        )
