"""Making one partition: reading its slices, tokenising, packing, and writing its shards and its report.

A partition is finished once its report is there: what a killed process left is written over.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from llmtrain.config.addresses import is_remote
from llmtrain.config.output_folder import replace_file
from llmtrain.data.baselines import XZ_BYTES
from llmtrain.data.dedup import position
from llmtrain.data.encode import DocumentMarks, EncodedBatch, Encoder
from llmtrain.data.engine_choice import EngineChoice
from llmtrain.data.partitions import Partition
from llmtrain.data.provenance import DocumentRecorder, documents_path, write_documents
from llmtrain.data.records import BadRecord, DocumentPiece, SetAside, Slice, read_slice
from llmtrain.data.source_files import PrepareError
from llmtrain.data.split_writer import SplitWriter
from llmtrain.data.token_documents import TokenFileReader
from llmtrain.data.token_kinds import TokenKind, token_kind

NAMED_BAD_RECORDS = 20
"""Number of unreadable records that a report names; all are counted."""
BATCH_CHARACTERS = 1 << 20
"""Text that is tokenised at a time."""
_SMALL_FILE, _HELD_CHARACTERS = 4 << 20, 16 << 20
"""A file of so few bytes is read to its end before any of its text is tokenised, unless it holds so many characters."""
REPORTS = "partitions"
"""Folder of the reports, beside train/ and validation/."""
SPLITS = ("train", "validation")


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
    text_key: str
    seed: int
    validation_fraction: float
    stop_at_bad: bool
    """Raise PrepareError at the first record that cannot be read."""


@dataclass
class PartitionReport:
    """Result of a partition.

    splits: name -> counts; shards: name -> entries of the index; rest: name -> (tokens, bytes) that no sample holds.
    """

    id: str
    splits: dict[str, dict[str, int]]
    shards: dict[str, list[dict[str, Any]]]
    open_document: dict[str, bool]
    """True for a split whose last document ends in the next partition."""
    read_bytes: int
    """UTF-8 bytes of text that was read."""
    keeps_text: bool
    bad_bytes: int = 0
    """Of records that could not be read."""
    aside_bytes: int = 0
    """Of slices that were set aside, as stored."""
    bad_count: int = 0
    bad: list[str] = field(default_factory=list)
    passed_over_count: int = 0
    duplicate_count: int = 0
    duplicates: list[str] = field(default_factory=list)
    """Names of the first of them."""

    def arrays(self, folder: Path) -> dict[str, NDArray]:
        """`counts_SPLIT` [vocab_size], `rest_SPLIT`, `rest_bytes_SPLIT` and `held_text`, of a partition in `folder`."""
        with np.load(_arrays_path(folder, self.id)) as file:
            return dict(file)


def _report_path(folder: Path, id: str) -> Path:
    return folder / REPORTS / f"{id}.json"


def _arrays_path(folder: Path, id: str) -> Path:
    return folder / REPORTS / f"{id}.npz"


def read_report(folder: Path, id: str) -> PartitionReport | None:
    """The report of a partition that is finished in `folder`, with its shards there and of their size; else None."""
    try:
        content = json.loads(_report_path(folder, id).read_text(encoding="utf-8"))
        report = PartitionReport(**content)
        beside = (_arrays_path(folder, id), documents_path(folder / REPORTS, id))
        whole = all(path.is_file() for path in beside) and all(
            (folder / name / entry["zip_data"]["basename"]).stat().st_size == entry["zip_data"]["bytes"]
            for name, entries in report.shards.items()
            for entry in entries
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if whole else None


def copy_partition(source: Path, target: Path, report: PartitionReport) -> bool:
    """Copy a finished partition, by links where the file system has them. Returns False, copying nothing, for a damaged one."""
    shards = {
        Path(name, entry["zip_data"]["basename"]): entry for name, entries in report.shards.items() for entry in entries
    }
    for file, entry in shards.items():
        with open(source / file, "rb") as stream:
            if hashlib.file_digest(stream, xxhash.xxh64).hexdigest() != entry["zip_data"]["hashes"]["xxh64"]:  # type: ignore[arg-type]
                return False
    reports = Path(REPORTS)
    for file in (
        *shards,
        _arrays_path(Path(), report.id),
        documents_path(reports, report.id),
        _report_path(Path(), report.id),
    ):
        (target / file).unlink(missing_ok=True)
        try:
            os.link(source / file, target / file)
        except OSError:
            shutil.copyfile(source / file, target / file)
    return True


class _ReadAgain(Exception):
    """Text of a slice that turned out damaged is in the shards already."""


class PartitionMaker:
    """Callable that makes partitions, one after the other. advance: called with the stored bytes that were read."""

    def __init__(self, settings: MakeSettings, advance: Callable[[int], None]) -> None:
        self.settings, self.advance = settings, advance
        self.encoder = Encoder(
            settings.tokenizer, settings.marks, settings.seed, settings.validation_fraction, settings.engine
        )

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
                return work.run(aside)
            except _ReadAgain:
                continue


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
        self.left_out = frozenset(duplicates.tolist() if duplicates is not None else ())
        self.duplicates: list[str] = []
        self.duplicate_count = 0
        settings = self.settings = maker.settings
        self._untold = 0  # stored bytes of the slice that advance() was not called with yet
        self.left, self.keeps_text = limit, keeps_text
        self.held_text = bytearray()
        self.pieces: list[DocumentPiece] = []
        self.origins: list[int] = []
        """Number of the slice that each of `pieces` is from."""
        self.characters = self.read_bytes = 0
        self.bad: list[BadRecord] = []
        self.bad_count = self.bad_bytes = self.aside_bytes = self.passed_over = 0
        names = SPLITS if settings.validation_fraction > 0 else SPLITS[:1]
        self.recorder = DocumentRecorder(names)
        self.writers = {
            name: SplitWriter(
                settings.folder / name,
                partition.id,
                settings.seq_len,
                settings.vocab_size,
                name == "validation",
                settings.marks.eod_id if settings.packing == "best_fit" else None,
            )
            for name in names
        }

    def run(self, aside: dict[Slice, BadRecord]) -> PartitionReport:
        """aside: slices known to be damaged; gets those that turn out to be."""
        for part in self.partition.slices:
            self._untold = part.end - part.begin
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
            self._tell(self._untold)
            if self.left is not None and self.left <= 0:
                break
        self._encode()
        return self._finish()

    def _read(self, part: Slice, aside: dict[Slice, BadRecord]) -> None:
        small = part.end - part.begin <= _SMALL_FILE
        first, found, written = len(self.pieces), [], False
        before = self.left, self.characters
        document, copies, copied = 0, 0, []
        try:
            told = functools.partial(self.recorder.tell, self._slice)
            for item in read_slice(part, self.settings.text_key, told):
                if isinstance(item, BadRecord):
                    self._stop_at(item)
                    found.append(item) if len(found) < NAMED_BAD_RECORDS else self._count(item)
                    continue
                here = position(self._slice, document)
                document += item.ends
                if here in self.left_out:
                    copies += item.ends
                    copied += [item.name] if item.ends and copies <= NAMED_BAD_RECORDS else []
                    continue
                self.pieces.append(item)
                self.origins.append(self._slice)
                self.characters += len(item.text)
                if self.left is not None:
                    self.left -= len(item.text.encode())
                    if self.left <= 0:
                        break
                if self.characters >= (_HELD_CHARACTERS if small else BATCH_CHARACTERS):
                    self._encode()
                    first, written = 0, True
        except SetAside as error:
            self._stop_at(error.bad)
            aside[part] = error.bad
            if written:
                raise _ReadAgain from error
            del self.pieces[first:], self.origins[first:]
            self.left, self.characters = before
            found, copies, copied = [error.bad], 0, []
        for bad in found:
            self._note(bad)
        self._leave_out(copies, copied)

    def _leave_out(self, count: int, names: Sequence[str]) -> None:
        """Note duplicates. names: of the first of them."""
        self.duplicate_count += count
        self.duplicates += names[: NAMED_BAD_RECORDS - len(self.duplicates)]

    def _read_tokens(self, part: Slice, kind: TokenKind) -> None:
        self._encode()  # what comes before
        document = 0
        try:
            for batch, records, unit in self.maker.token_files(part, kind):
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
                self._leave_out(len(copies), [f"{part.file.name}@{record}" for record in copies[:NAMED_BAD_RECORDS]])
                chosen &= in_time
                self.recorder.tell(self._slice, unit, 0)
                some = np.array(records)[chosen].tolist()
                self._take(batch.select(chosen), some, [self._slice] * len(some))
                if self.left is not None and self.left <= 0:
                    break
        except SetAside as error:
            self._stop_at(error.bad)
            self._note(error.bad)

    def _stop_at(self, bad: BadRecord) -> None:
        if bad.fatal and self.settings.stop_at_bad:
            raise unreadable(bad)

    def _note(self, bad: BadRecord) -> None:
        self._count(bad)
        if len(self.bad) < NAMED_BAD_RECORDS:
            self.bad.append(bad)

    def _count(self, bad: BadRecord) -> None:
        if bad.fatal:
            self.bad_count += 1
            self.aside_bytes += bad.nbytes * bad.is_slice
            self.bad_bytes += bad.nbytes * (not bad.is_slice)
        else:
            self.passed_over += 1

    def _encode(self) -> None:
        if not self.pieces:
            return
        batch = self.maker.encoder(self.pieces)
        if self.keeps_text:
            for piece, out in zip(self.pieces, batch.held_out, strict=True):
                if out and len(self.held_text) < XZ_BYTES:
                    self.held_text += piece.text.encode()[: XZ_BYTES - len(self.held_text)]
        self._take(batch, [piece.record for piece in self.pieces], self.origins)
        self._tell(min(self._untold, self.characters))
        self.pieces, self.origins, self.characters = [], [], 0

    def _take(self, batch: EncodedBatch, records: Sequence[int], origins: Sequence[int]) -> None:
        """Pack a batch. records, origins: of each piece, its number and that of its slice."""
        self.read_bytes += int(batch.text_bytes.sum())
        _add(self.writers, batch)
        of_piece = (batch.held_out.tolist(), batch.tokens.tolist(), batch.text_bytes.tolist())
        for record, number, out, tokens, nbytes in zip(records, origins, *of_piece, strict=True):
            self.recorder.add(SPLITS[out], number, record, tokens, nbytes)

    def _tell(self, nbytes: int) -> None:
        self._untold -= nbytes
        self.maker.advance(nbytes)

    def _finish(self) -> PartitionReport:
        settings, id = self.settings, self.partition.id
        finished = {name: writer.finish() for name, writer in self.writers.items()}
        arrays: dict[str, NDArray] = {"held_text": np.frombuffer(bytes(self.held_text), np.uint8)}
        for name, writer in self.writers.items():
            arrays |= {
                f"counts_{name}": writer.counts,
                f"rest_{name}": writer.rest,
                f"rest_bytes_{name}": writer.rest_bytes,
            }
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
        report = PartitionReport(
            id=id,
            splits={name: counts for name, (counts, _) in finished.items()},
            shards={name: entries for name, (_, entries) in finished.items()},
            open_document={name: writer.open_document for name, writer in self.writers.items()},
            read_bytes=self.read_bytes,
            keeps_text=self.keeps_text,
            bad_bytes=self.bad_bytes,
            aside_bytes=self.aside_bytes,
            bad_count=self.bad_count,
            bad=[str(bad) for bad in self.bad],
            passed_over_count=self.passed_over,
            duplicate_count=self.duplicate_count,
            duplicates=self.duplicates,
        )
        layouts = {name: one.best_fit.layout() for name, one in self.writers.items() if one.best_fit is not None}
        replace_file(_arrays_path(settings.folder, id), content.getvalue())
        write_documents(settings.folder / REPORTS, id, self.recorder.documents(layouts))
        replace_file(_report_path(settings.folder, id), json.dumps(vars(report)).encode("utf-8", "surrogateescape"))
        return report


def unreadable(bad: BadRecord) -> PrepareError:
    return PrepareError(f"{bad}\nmend it, or skip such records with skip_bad_records (--skip-bad-records) or max_bad")


def refuse_changed(part: Slice) -> None:
    """Raise PrepareError if the file is another one than when it was listed."""
    file = part.file
    if not is_remote(file.path) and os.path.exists(file.path):
        stat = os.stat(file.path)
        if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
            raise PrepareError(
                f"{file.path} has changed since the command began; start it again once the sources stay as they are"
            )


def _add(writers: dict[str, SplitWriter], batch: EncodedBatch) -> None:
    is_held_token = np.repeat(batch.held_out, batch.tokens)
    for writer in writers.values():
        held = writer.held_out
        sizes = batch.held_bytes if held else np.zeros(0, np.int64)
        chosen = batch.held_out == held
        writer.add(
            batch.ids[is_held_token == held],
            sizes,
            batch.tokens[chosen],
            batch.ends[chosen],
            int(batch.text_bytes[chosen].sum()),
        )
