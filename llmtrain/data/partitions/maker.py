"""Making one partition: reading its slices, tokenising, packing, and writing its shards and its report.

A partition is finished once its report is there: what a killed process left is written over.
"""

import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.addresses import is_remote
from llmtrain.config.output_folder import replace_file
from llmtrain.data.chat.conversation import PREFERENCES
from llmtrain.data.chat.preferences import PreferenceEncoder
from llmtrain.data.chat.samples import ChatEncoder, ChatSettings
from llmtrain.data.partitions.array_file import pack_arrays
from llmtrain.data.partitions.baselines import XZ_BYTES
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.partitions.dedup import position
from llmtrain.data.partitions.prepared_folder import REPORTS, SPLITS
from llmtrain.data.partitions.provenance import DocumentRecorder, write_documents
from llmtrain.data.partitions.report import NAMED_BAD_RECORDS, PartitionReport, arrays_path, report_path
from llmtrain.data.partitions.stored_folder import StoredFolder
from llmtrain.data.shards.split_writer import SplitWriter
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.sources.records import BadRecord, Pieces, SetAside, Slice, read_pieces
from llmtrain.data.sources.token_documents import TokenFileReader
from llmtrain.data.sources.token_kinds import TokenKind, token_kind
from llmtrain.data.sources.tolerance import Tolerance
from llmtrain.data.tokenize.encode import DocumentMarks, EncodedBatch, Encoder
from llmtrain.data.tokenize.engine_choice import EngineChoice

BATCH_CHARACTERS = 2 << 20
"""Text that is tokenised at a time."""
_SMALL_FILE, _HELD_CHARACTERS = 4 << 20, 16 << 20
"""A file of so few bytes is read to its end before any of its text is tokenised, unless it holds so many characters."""


@dataclass(frozen=True)
class MakeSettings:
    """All that a process needs besides the partition. tokenizer: the content of a tokenizer.json; folder: gets the shards."""

    folder: Path
    tokenizer: str
    engine: EngineChoice
    marks: DocumentMarks
    vocab_size: int
    seq_len: int
    packing: str
    compression: str
    text_key: str
    seed: int
    validation_fraction: float
    tolerance: Tolerance = field(default_factory=Tolerance)
    chat: ChatSettings | None = None
    """Records are conversations."""
    store: StoredFolder | None = None
    """Gets each partition that is finished."""


class _ReadAgain(Exception):
    """Text of a slice that turned out damaged is in the shards already."""


class PartitionMaker:
    """Callable that makes partitions, one after the other. advance: called with the stored bytes that were read."""

    def __init__(self, settings: MakeSettings, advance: Callable[[int], None]) -> None:
        self.settings, self.advance = settings, advance

    @functools.cached_property
    def encoder(self) -> Encoder:
        of = self.settings
        return Encoder(of.tokenizer, of.marks, of.seed, of.validation_fraction, of.engine)

    @functools.cached_property
    def chat_encoder(self) -> ChatEncoder | PreferenceEncoder | None:
        of = self.settings
        if of.chat is None:
            return None
        kind = PreferenceEncoder if of.chat.name in PREFERENCES else ChatEncoder
        return kind(of.tokenizer, of.marks, of.chat, of.seq_len, of.seed, of.validation_fraction)

    @functools.cached_property
    def token_files(self) -> TokenFileReader:
        of = self.settings
        return TokenFileReader(of.tokenizer, of.vocab_size, of.marks, of.seed, of.validation_fraction)

    def __call__(
        self,
        partition: Partition,
        limit: int | None = None,
        keeps_text: bool = False,
        duplicates: NDArray[np.int64] | None = None,
    ) -> PartitionReport:
        """limit: bytes of text after which it ends. keeps_text: keep the held-out text for the baseline of xz. duplicates:
        positions of documents to leave out.

        Raises PrepareError at what cannot be read, with stop_at_bad.
        """
        aside: dict[Slice, BadRecord] = {}
        while True:
            work = _Attempt(self, partition, limit, keeps_text, duplicates)
            try:
                report = work.run(aside)
            except _ReadAgain:
                continue
            if self.settings.store:
                self.settings.store.bring(report)
            return report


class _Attempt:
    def __init__(
        self,
        maker: PartitionMaker,
        partition: Partition,
        limit: int | None,
        keeps_text: bool,
        duplicates: NDArray[np.int64] | None,
    ) -> None:
        self.maker, self.partition = maker, partition
        self.report = PartitionReport(partition.id, {}, {}, {}, 0, keeps_text)
        self.left_out = frozenset(duplicates.tolist() if duplicates is not None else ())
        settings = self.settings = maker.settings
        self._unreported_bytes = 0  # stored bytes of the slice that advance() was not called with yet
        self.left = limit
        self.held_text = bytearray()
        self.pieces: list[Pieces] = []
        self.origins: list[int] = []
        """Number of the slice that each of `pieces` is from."""
        self.characters = 0
        self._bad_weight = 0  # of the slice that is read
        names = SPLITS if settings.validation_fraction > 0 else SPLITS[:1]
        self.recorder = DocumentRecorder(names)
        self.writers = {
            name: SplitWriter(
                settings.folder / name,
                partition.id,
                settings.seq_len,
                settings.vocab_size,
                name == "validation",
                len(names) > 1,
                settings.compression,
                settings.marks.eod_id if settings.packing != "concatenate" else None,
                settings.packing == "padded",
                settings.chat is not None,
            )
            for name in names
        }

    def run(self, aside: dict[Slice, BadRecord]) -> PartitionReport:
        """aside: slices known to be damaged; gets those that turn out to be."""
        for part in self.partition.slices:
            self._unreported_bytes = part.end - part.begin
            self._slice = self.recorder.begin(part)
            if part in aside:
                self._note(aside[part])
            elif kind := token_kind(part.file.path, part.file.from_folder):
                self._read_tokens(part, kind)
            else:
                self._read(part, aside)
            if self.characters >= BATCH_CHARACTERS:
                self._encode()
            refuse_changed(part)
            self._report_progress(self._unreported_bytes)
            if self.left is not None and self.left <= 0:
                break
        self._encode()
        return self._finish()

    def _read(self, part: Slice, aside: dict[Slice, BadRecord]) -> None:
        small = part.end - part.begin <= _SMALL_FILE
        first, found, written = len(self.pieces), [], False
        before = self.left, self.characters
        document, copies, copied = 0, 0, []
        weight = self._bad_weight = 0
        try:
            told = functools.partial(self.recorder.tell, self._slice)
            for item in read_pieces(part, self.settings.text_key, told):
                if isinstance(item, BadRecord):
                    self.settings.tolerance.refuse(item)
                    found.append(item) if len(found) < NAMED_BAD_RECORDS else self._count(item)
                    continue
                weight += item.weight
                begun = document
                document += len(item.texts) if item.ends else 0
                if self.left_out:
                    item, records = self._without_copies(item, begun)
                    copies += len(records)
                    copied += records[: NAMED_BAD_RECORDS - len(copied)]
                if self.left is not None:
                    item = self._in_time(item)
                if item.texts:
                    self.pieces.append(item)
                    self.origins.append(self._slice)
                    self.characters += sum(map(len, item.texts))
                if self.left is not None and self.left <= 0:
                    break
                if self.characters >= (_HELD_CHARACTERS if small else BATCH_CHARACTERS):
                    self._encode()
                    first, written = 0, True
        except SetAside as error:
            self.settings.tolerance.refuse(error.bad)
            aside[part] = error.bad
            if written:
                raise _ReadAgain from error
            del self.pieces[first:], self.origins[first:]
            self.left, self.characters = before
            found, copies, copied, self._bad_weight = [error.bad], 0, [], 0
        for bad in found:
            self._note(bad)
        if self._bad_weight:
            self.report.bad_bytes += (part.end - part.begin) * self._bad_weight / (self._bad_weight + weight)
        self._leave_out(copies, copied)

    def _without_copies(self, item: Pieces, begun: int) -> tuple[Pieces, list[int]]:
        """The pieces that are not to be left out, and the records of documents that end in the others. begun: number of the first
        one's document in its slice."""
        left_out = [position(self._slice, begun + number) in self.left_out for number in range(len(item.texts))]
        kept = item.select([number for number, out in enumerate(left_out) if not out])
        return kept, [item.records[number] for number, out in enumerate(left_out) if out and item.ends]

    def _in_time(self, item: Pieces) -> Pieces:
        """The pieces up to the one that reaches the limit."""
        assert self.left is not None
        for number, text in enumerate(item.texts):
            self.left -= len(text.encode())
            if self.left <= 0:
                return item.select(list(range(number + 1)))
        return item

    def _leave_out(self, count: int, records: Sequence[int]) -> None:
        """Note duplicates of the open slice. records: of the first of them."""
        self.report.duplicate_count += count
        copies = self.report.copies
        copies += [(self._slice, record) for record in records[: NAMED_BAD_RECORDS - len(copies)]]

    def _read_tokens(self, part: Slice, kind: TokenKind) -> None:
        self._encode()  # what comes before
        document = 0
        try:
            for item in self.maker.token_files(part, kind):
                if isinstance(item, BadRecord):
                    self.settings.tolerance.refuse(item)
                    self._note(item)
                    continue
                batch, records, unit = item
                chosen = np.array(
                    [position(self._slice, document + n) not in self.left_out for n in range(len(records))]
                )
                document += len(records)
                if self.left is not None:
                    before = np.cumsum(batch.text_bytes * chosen) - batch.text_bytes * chosen
                    in_time = before < self.left
                    self.left -= int(batch.text_bytes[chosen & in_time].sum())
                else:
                    in_time = np.ones(len(chosen), bool)
                copies = np.array(records)[in_time & ~chosen]
                self._leave_out(len(copies), copies[:NAMED_BAD_RECORDS].tolist())
                chosen &= in_time
                self.recorder.tell(self._slice, unit, 0)
                some = np.array(records, np.int64)[chosen]
                self._take(batch.select(chosen), some, np.full(len(some), self._slice))
                if self.left is not None and self.left <= 0:
                    break
        except SetAside as error:
            self.settings.tolerance.refuse(error.bad)
            self._note(error.bad)

    def _note(self, bad: BadRecord) -> None:
        self._count(bad)
        if len(self.report.bad) < NAMED_BAD_RECORDS:
            self.report.bad.append(str(bad))

    def _count(self, bad: BadRecord) -> None:
        if bad.fatal:
            self.report.bad_count += 1
            self.report.aside_bytes += bad.nbytes
            self._bad_weight += bad.weight
        else:
            self.report.passed_over_count += 1
            self.report.passed_over_bytes += bad.nbytes

    def _encode(self) -> None:
        if not self.pieces:
            return
        records = np.fromiter(itertools.chain.from_iterable(some.records for some in self.pieces), np.int64)
        origins = np.repeat(self.origins, [len(some.texts) for some in self.pieces])
        if self.maker.chat_encoder is not None:
            batch, cut, useless = self.maker.chat_encoder(self.pieces)
            self._note_cut(cut)
            report = self.report
            report.untrained_count += int(useless.sum())
            named = zip(origins[useless].tolist(), records[useless].tolist(), strict=True)
            report.untrained += itertools.islice(named, NAMED_BAD_RECORDS - len(report.untrained))
            batch, records, origins = batch.select(~useless), records[~useless], origins[~useless]
        else:
            batch = self.maker.encoder(self.pieces)
        if self.report.keeps_text and batch.held_out.any():
            texts = list(itertools.chain.from_iterable(some.texts for some in self.pieces))
            for number in np.flatnonzero(batch.held_out).tolist():
                if len(self.held_text) < XZ_BYTES:
                    self.held_text += texts[number].encode()[: XZ_BYTES - len(self.held_text)]
        self._take(batch, records, origins)
        self._report_progress(min(self._unreported_bytes, self.characters))
        self.pieces, self.origins, self.characters = [], [], 0

    def _note_cut(self, cut: NDArray[np.int64]) -> None:
        """Count conversations that are longer than a sample, by file. cut: the tokens that each has lost."""
        files = np.repeat([some.file for some in self.pieces], [len(some.texts) for some in self.pieces])
        for file, tokens in zip(files[cut > 0].tolist(), cut[cut > 0].tolist(), strict=True):
            count, lost = self.report.truncated.get(file, (0, 0))
            self.report.truncated[file] = count + 1, lost + tokens

    def _take(self, batch: EncodedBatch, records: NDArray[np.int64], origins: NDArray[np.int64]) -> None:
        """Pack a batch. records, origins: of each piece, its number and that of its slice."""
        self.report.read_bytes += int(batch.text_bytes.sum())
        flagged = self.settings.chat is not None
        if self.report.first_token is None and not flagged and len(batch.tokens) and batch.tokens[0] > 1:
            self.report.first_token = int(batch.ids[0])
        for name, writer in self.writers.items():
            held = writer.held_out
            chosen = batch.held_out == held
            tokens, nbytes = batch.tokens[chosen], batch.text_bytes[chosen]
            held_bytes = batch.held_bytes if held else np.zeros(0, np.int64)
            writer.add(batch.ids_of(held), held_bytes, tokens, batch.ends[chosen], int(nbytes.sum()))
            self.recorder.add(name, origins[chosen], records[chosen], tokens, nbytes)

    def _report_progress(self, nbytes: int) -> None:
        self._unreported_bytes -= nbytes
        self.maker.advance(nbytes)

    def _finish(self) -> PartitionReport:
        settings, report, id = self.settings, self.report, self.partition.id
        arrays: dict[str, NDArray] = {"held_text": np.frombuffer(bytes(self.held_text), np.uint8)}
        for name, writer in self.writers.items():
            report.splits[name], report.shards[name] = writer.finish()
            report.open_document[name] = writer.open_document
            arrays |= {
                f"counts_{name}": writer.counts,
                f"rest_{name}": writer.rest,
                f"rest_bytes_{name}": writer.rest_bytes,
            }
        layouts = {name: one.best_fit.layout() for name, one in self.writers.items() if one.best_fit is not None}
        replace_file(arrays_path(settings.folder, id), pack_arrays(arrays))
        write_documents(settings.folder / REPORTS, id, self.recorder.documents(layouts))
        replace_file(report_path(settings.folder, id), json.dumps(vars(report)).encode("utf-8", "surrogateescape"))
        return report


def refuse_changed(part: Slice) -> None:
    """Raise PrepareError if the file is another one than when it was listed."""
    file = part.file
    if not is_remote(file.path) and os.path.exists(file.path):
        stat = os.stat(file.path)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            raise PrepareError(
                f"{file.path} has changed since the command began; start it again once the sources stay as they are"
            )
